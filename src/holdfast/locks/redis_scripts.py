"""The scripts that Redis runs for the locks. `redis` describes the keys."""

from __future__ import annotations

import hashlib

CHANGES = "holdfast:changes"  # the channel
KEYS = ("holders", "queue", "waiters", "token", "numbers")


class Script:
    """A script, and the name by which the server knows it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode()).hexdigest()


# Shared by the scripts. An expired holder or waiter is dropped by the next script that meets it.
_COMMON = """
local holders, queue, waiters, token, numbers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local channel, id = ARGV[1], ARGV[2]
local KEEP = 200000000  -- milliseconds, and more than the longest ttl. Then Redis deletes what dead processes left
local moment = redis.call('TIME')
local now = moment[1] * 1000 + math.floor(moment[2] / 1000)

local function kind_of(member) return string.match(member, '^[^:]*') end

local function drop_expired()
  redis.call('ZREMRANGEBYSCORE', holders, '-inf', now)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', waiters, '-inf', now)) do
    redis.call('ZREM', waiters, member)
    redis.call('ZREM', queue, member)
  end
end

local function fits(kind, more)
  local held = redis.call('ZRANGE', holders, 0, -1)
  if kind == 'x' then return #held + more == 0 end
  if kind ~= 's' and #held + more >= tonumber(kind) then return false end
  for _, member in ipairs(held) do
    if kind_of(member) ~= kind then return false end
  end
  return true
end

-- Tell the programs that show all locks, if there are any. It does not matter if the user has no right to that.
local function tell()
  local found = redis.pcall('PUBSUB', 'NUMSUB', '{CHANGES}')
  if found[2] and found[2] ~= 0 then redis.pcall('PUBLISH', '{CHANGES}', '') end
end

-- Make a member a holder until its lease ends, and return its token.
local function enter(member, ends)
  redis.call('ZADD', holders, ends, member)
  redis.call('PEXPIRE', holders, KEEP)
  redis.call('ZREM', queue, member)
  redis.call('ZREM', waiters, member)
  local next = string.format('%.0f', moment[1] * 1000000 + moment[2])
  local last = redis.call('GET', token)
  if last and (#last > #next or (#last == #next and last >= next)) then next = string.format('%.0f', last + 1) end
  redis.call('SET', token, next, 'PX', KEEP)
  tell()
  return next
end
""".replace("{CHANGES}", CHANGES)
# Returns {1, token}, {0, milliseconds until a lease in front of the caller may expire}, or {-1, the kind of a holder}.
ACQUIRE = Script(
    _COMMON
    + """
local ttl, waits = tonumber(ARGV[3]), ARGV[4] == '1'
local function grant() return {1, enter(id, now + ttl)} end
if redis.call('EXISTS', holders, queue) == 0 then return grant() end

drop_expired()
if redis.call('ZSCORE', holders, id) then return grant() end  -- a release has granted it, and the message was lost
local kind = kind_of(id)
local rank = redis.call('ZRANK', queue, id)
local in_turn = true
for _, other in ipairs(redis.call('ZRANGE', queue, 0, rank or 1023)) do
  if other ~= id and (kind == 'x' or not rank or kind_of(other) ~= kind) then in_turn = false break end
end
if in_turn and fits(kind, tonumber(kind) and rank or 0) then return grant() end
for _, member in ipairs(redis.call('ZRANGE', holders, 0, 0)) do
  local other = kind_of(member)
  if tonumber(kind) and tonumber(other) and kind ~= other then return {-1, other} end
end
if waits then
  if not rank then
    redis.call('ZADD', queue, redis.call('INCR', numbers), id)
    tell()
  end
  redis.call('ZADD', waiters, now + ttl, id)
  for _, key in ipairs({queue, waiters, numbers}) do redis.call('PEXPIRE', key, KEEP) end
end
local soonest = now + ttl
for _, set in ipairs({holders, waiters}) do
  local found = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  if found[2] and found[1] ~= id then soonest = math.min(soonest, tonumber(found[2])) end
end
return {0, soonest - now + 1}
"""
)
# Returns 1 if the id was a holder whose lease has not expired. Grants the lock to the waiters whose turn it is now,
# until their places would have expired. Publishes their tokens and ids.
RELEASE = Script(
    _COMMON
    + """
redis.call('ZREMRANGEBYSCORE', holders, '-inf', now)
local known = redis.call('ZREM', holders, id)
tell()
if redis.call('EXISTS', queue) == 0 then return known end

redis.call('ZREM', queue, id)
redis.call('ZREM', waiters, id)
drop_expired()
for _, member in ipairs(redis.call('ZRANGE', queue, 0, 1023)) do
  if not fits(kind_of(member), 0) then break end
  redis.call('PUBLISH', channel, enter(member, redis.call('ZSCORE', waiters, member) or now) .. ' ' .. member)
end
if redis.call('EXISTS', queue) == 0 then redis.call('DEL', numbers) end
return known
"""
)
RENEW = Script(
    _COMMON
    + """
redis.call('ZREMRANGEBYSCORE', holders, '-inf', now)
if not redis.call('ZSCORE', holders, id) then return 0 end
redis.call('ZADD', holders, now + tonumber(ARGV[3]), id)
redis.call('PEXPIRE', holders, KEEP)
return 1
"""
)
STATUS = Script(
    _COMMON
    + """
drop_expired()
return {redis.call('ZRANGE', holders, 0, -1), redis.call('ZRANGE', queue, 0, -1)}
"""
)
