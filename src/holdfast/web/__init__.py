"""`holdfast web`: locks, queues and events in a browser.

command    the options of the command, and the server
security   every request passes here first: token or password, Host, Origin, Sec-Fetch-Site, headers of every answer
console    what is shown: locks with their history, queues, event stores
watching   waits for file events and for news of servers, while a page is open
live       sends a page again, as a server-sent event, when its content has changed
app        the pages
actions    what a page may change, with confirmation and audit log
prometheus /metrics
text       how values become text: times, numbers, secrets

A page is rendered by the server. Its script, static/app.js, replaces the content of <main> with what the server sends.
"""
