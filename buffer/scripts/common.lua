-- What every script begins with (lua.py puts this text before each of them).
--
-- Convention:
--   KEYS[1]  the run's prefix, '{leash:RUN}'. All keys are made from it: one hash tag, one slot.
--   ARGV     as the head of each script lists them; payload blobs never pass through here.
--   Reply    an array whose first item is a word ('stored', 'wait', ...), or one integer.
--   A script is one atomic step, does a bounded amount of work, and may be sent again at any time.
--
-- A group's own HASH is 'group:<id>'. Its field `state` is one of
--   ready | leased | consumed | acked | dropped:<reason>
-- and agrees at every moment with the one set that holds the group. The last two are tombstones: they
-- stay for a while without payload, so that a late retry of a push is still known as a duplicate.

local function key(name) return KEYS[1] .. ':' .. name end
local function group_key(id) return key('group:' .. id) end
local function payload_key(id) return key('payload:' .. id) end
local function lease_key(step) return key('lease:' .. step) end

local SETTINGS, STATS = key('settings'), key('stats')
local RUNNING, READY, ARRIVALS = key('running'), key('ready'), key('arrivals')
local LEASED, CONSUMED, RETRIES = key('leased'), key('consumed'), key('retries')
local ENGINES = key('engine_versions')

local SEQ_RANGE = 4294967296 -- 2^32: `ready` is scored min_version * 2^32 + sequence number
local TOMBSTONE_S = 86400

if redis.call('EXISTS', SETTINGS) == 0 then
  return redis.error_reply('NOTOPEN no settings at ' .. SETTINGS)
end

local function setting(name) return tonumber(redis.call('HGET', SETTINGS, name)) end

local function count(name, amount) redis.call('HINCRBY', STATS, name, amount) end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number) return string.format('%.0f', number) end

-- Wake streams. Only the last entry is kept: a waiter remembers the id that it saw together with the
-- condition that failed, and blocks in XREAD until there is a later one. So no wake-up is ever lost,
-- and none is stolen by a waiter that dies.
local function wake(name) redis.call('XADD', key('wake:' .. name), 'MAXLEN', '1', '*', 'w', '1') end

local function last_wake(name)
  local newest = redis.call('XREVRANGE', key('wake:' .. name), '+', '-', 'COUNT', '1')
  return newest[1] and newest[1][1] or '0-0'
end

-- A lease that found too few groups leaves its number in `wanted`; pushes below it wake nobody.
local function wake_batch()
  local wanted = setting('wanted')
  if wanted > 0 and redis.call('ZCARD', READY) >= wanted then wake('batch') end
end

local function enter_ready(id, score)
  redis.call('ZADD', READY, whole(score), id)
  if redis.call('HGET', SETTINGS, 'selector') == 'fifo' then
    redis.call('ZADD', ARRIVALS, whole(score % SEQ_RANGE), id)
  end
end

local function leave_ready(id)
  redis.call('ZREM', READY, id)
  redis.call('ZREM', ARRIVALS, id)
end

-- The fence: the group is leased, and by this owner.
local function is_held(id, owner)
  local held = redis.call('HMGET', group_key(id), 'state', 'owner')
  return held[1] == 'leased' and held[2] == owner
end

local function return_to_ready(id)
  redis.call('ZREM', LEASED, id)
  enter_ready(id, tonumber(redis.call('HGET', group_key(id), 'score')))
  redis.call('HSET', group_key(id), 'state', 'ready', 'owner', '')
end

-- Turns a group that no set holds any more into a tombstone.
local function bury(id, state)
  local size = redis.call('HMGET', group_key(id), 'bytes', 'tokens')
  redis.call('UNLINK', payload_key(id))
  redis.call('HSET', group_key(id), 'state', state, 'owner', '')
  redis.call('EXPIRE', group_key(id), TOMBSTONE_S)
  count('bytes', -size[1])
  count('tokens', -size[2])
end

-- Puts a prompt whose group went stale in line again, while its retries last.
local function requeue(task, index, attempt)
  if redis.call('HGET', SETTINGS, 'on_stale') ~= 'requeue' then return end
  if tonumber(attempt) >= setting('max_retries') then
    count('retries_exhausted', 1)
    return
  end
  redis.call('RPUSH', RETRIES, whole(attempt + 1) .. ' ' .. index .. ' ' .. task)
  count('requeued', 1)
end

local function drop_stale(id)
  local prompt = redis.call('HMGET', group_key(id), 'task', 'index', 'attempt')
  bury(id, 'dropped:stale')
  count('dropped:stale', 1)
  requeue(prompt[1], prompt[2], prompt[3])
end

local function oldest_fresh(version) return version - setting('max_staleness') end

-- Drops at most `limit` ready groups that training version `version` may not use any more.
local function drop_stale_ready(version, limit)
  local cutoff = '(' .. whole(oldest_fresh(version) * SEQ_RANGE)
  local stale = redis.call('ZRANGE', READY, '-inf', cutoff, 'BYSCORE', 'LIMIT', '0', limit)
  for _, id in ipairs(stale) do
    leave_ready(id)
    drop_stale(id)
  end
  if #stale > 0 then wake('room') end
  return #stale
end

-- Returns at most `limit` groups to ready whose lease nobody renewed in time.
local function expire_leases(limit)
  local expired = redis.call('ZRANGE', LEASED, '-inf', whole(now_ms()), 'BYSCORE', 'LIMIT', '0', limit)
  for _, id in ipairs(expired) do return_to_ready(id) end
  if #expired > 0 then
    count('expired', #expired)
    wake_batch()
  end
  return #expired
end

