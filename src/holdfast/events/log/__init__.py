"""The engine of event stores in a directory: an append-only log in segments, for any number of processes.

    <store>/store.json     what this is: format, and an id that is in every line
    <store>/.store.lock    held while a process appends (`store_lock`, `commit`)
    <store>/events/…       the log, which is the only truth (`lines`, `segments`)
    <store>/ledger         up to where it is written and on disk (`ledger`, `disk`); derived
    <store>/index/…        where what is (`index`, `view`); derived
    <store>/projections/…  documents: what was made of events

Readers take no lock. They go up to what is on disk, and so never see a part of a batch, nor anything that is taken
back.
"""
