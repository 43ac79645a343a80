-- The first part of the library: what all scripts share. lua.py makes a script of the statements of
-- the library that it needs, of its own text as the body of main(), and of settle() after it.
-- A statement of the library begins at the start of a line; all its further lines are indented, or `end`.
--
-- Convention:
--   KEYS[1]  the shard's prefix, '{leash:RUN}'. All keys are made from it: one hash tag, one slot.
--   ARGV     as the head of each script lists them; payload blobs never pass through here.
--   Reply    an array whose first item is a word ('stored', 'wait', ...), or one integer.
--   A script is one atomic step, does a bounded amount of work, and may be sent again at any time.
--
-- A group's own HASH is 'group:<id>'. Its field `state` is one of
--   ready | leased | consumed | quarantined | acked | dropped:<reason>
-- and agrees at every moment with the one set that holds the group. The last two are tombstones:
-- nothing but the state, kept for a while so that a late retry of a push is known as a duplicate.

local function key(name) return KEYS[1] .. ':' .. name end
local function group_key(id) return KEYS[1] .. ':group:' .. id end
local function payload_key(id) return KEYS[1] .. ':payload:' .. id end
local function lease_key(step) return KEYS[1] .. ':lease:' .. step end

local SETTINGS, STATS, EVENTS = key('settings'), key('stats'), key('events')
local RUNNING, CREDITS, READY, ARRIVALS = key('running'), key('credits'), key('ready'), key('arrivals')
local LEASED, CONSUMED, QUARANTINED = key('leased'), key('consumed'), key('quarantined')
local RETRIES, BATCHES, ENGINES = key('retries'), key('batches'), key('engine_versions')

local SEQ_RANGE = 4294967296 -- 2^32: `ready` is scored gate version * 2^32 + sequence number

local held_settings = redis.call('HMGET', SETTINGS, 'trainer_version', 'max_staleness', 'on_stale',
  'selector', 'wanted', 'audit_length', 'lineage', 'reconciling')
if not held_settings[1] then return redis.error_reply('NOTOPEN no settings at ' .. SETTINGS) end
local trainer_version, max_staleness = tonumber(held_settings[1]), tonumber(held_settings[2])
local on_stale, selector, wanted = held_settings[3], held_settings[4], held_settings[5]
local audit_length, lineage = held_settings[6], held_settings[7]
local is_reconciling = held_settings[8] == '1' -- ready groups may bear numbers of before the rollback

local settings_read = {}
local function setting(name)
  local value = settings_read[name] or tonumber(redis.call('HGET', SETTINGS, name))
  settings_read[name] = value
  return value
end

local function whole(number) return string.format('%.0f', number) end

local now
local function now_ms()
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return now
end

-- A command with any number of items: Lua's stack does not take them all at once.
local function call_many(command, name, items)
  for first = 1, #items, 1000 do
    redis.call(command, name, unpack(items, first, math.min(first + 999, #items)))
  end
end

-- Counters and wake-ups of one call are gathered and written once, by settle().
local counts, wakes, is_batch_due = {}, {}, false

local function count(name, amount)
  if amount ~= 0 then counts[name] = (counts[name] or 0) + amount end
end

-- Wake streams keep their last entry only: a waiter remembers the id that it saw together with the
-- condition that failed, and blocks in XREAD until there is a later one. So no wake-up is ever lost,
-- and none is stolen by a waiter that dies.
local function wake(name) wakes[name] = true end

-- A lease that found too few groups leaves its number in `wanted`; what does not reach it wakes nobody.
local function wake_batch() is_batch_due = true end

-- A group is running no more. With on_stale=wait a lease may have waited for it, here or at another shard.
local function leave_running(id)
  redis.call('ZREM', CREDITS, id)
  local was_running = redis.call('ZREM', RUNNING, id) == 1
  if on_stale == 'wait' and wanted ~= '0' then wake('batch') end
  return was_running
end

local function settle()
  local names, values = {}, {}
  for name in pairs(counts) do names[#names + 1] = name end
  if #names > 0 then
    local before = redis.call('HMGET', STATS, unpack(names))
    for i, name in ipairs(names) do
      values[2 * i - 1], values[2 * i] = name, whole((before[i] or 0) + counts[name])
    end
    redis.call('HSET', STATS, unpack(values))
  end
  if is_batch_due and wanted ~= '0' and redis.call('ZCARD', READY) >= tonumber(wanted) then wake('batch') end
  for name in pairs(wakes) do redis.call('XADD', key('wake:' .. name), 'MAXLEN', '1', '*', 'w', '1') end
end

local function last_wake(name)
  local newest = redis.call('XREVRANGE', key('wake:' .. name), '+', '-', 'COUNT', '1')
  return newest[1] and newest[1][1] or '0-0'
end

-- One line of a group's life, for `make trace`. Details come as name, value: s(tep) v(ersion)
-- r(eason) o(wner).
local function audit(id, event, ...)
  if audit_length ~= '0' then
    redis.call('XADD', EVENTS, 'MAXLEN', '~', audit_length, '*', 'g', id, 'e', event, ...)
  end
end

local function oldest_fresh(version) return version - max_staleness end
