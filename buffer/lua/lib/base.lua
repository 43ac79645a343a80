-- Common to all scripts: the run's settings, number parsing, and counters and wake-ups, which a call
-- collects and writes once.
--
-- scripts.py puts the files of lib/ that define what a script uses before it, each once, base.lua first.
-- The script becomes the body of main(); settle() runs wherever it returns. The server creates all
-- functions anew at every call, so files of lib/ are small.
--
-- Convention:
--   KEYS[1]  the shard's prefix, '{leash:RUN}'. All keys are made from it: one hash tag, one slot.
--   ARGV[1]  the request, a MessagePack map with the fields that the head of each script lists; tokens
--            to keep follow as they are. Payloads are never passed to scripts.
--   Reply    an integer, a text, or an array: the fields of a struct, or a list. `false` stands for none.
--   A script is atomic, does a bounded amount of work, and may be repeated at any time.
--
-- A group's own HASH is 'group:<id>'. Its field `state` is one of
--   ready | leased | consumed | quarantined | acked | dropped:<reason> | abandoned
-- and always agrees with the one set that holds the group. The last three are tombstones: only the
-- state, kept for a while so that a late retry of a push is recognised as a duplicate. (An abandoned
-- group has one only if its prompt runs again while a push may still be in flight.)

local request = cmsgpack.unpack(ARGV[1])
local PREFIX = KEYS[1] .. ':'
local function key(name) return PREFIX .. name end

local SETTINGS = PREFIX .. 'settings'
local STATS = PREFIX .. 'stats'
local READY = PREFIX .. 'ready'

local SEQ_RANGE = 4294967296 -- 2^32: `ready` is scored gate version * 2^32 + sequence number
local MAX_ITEMS = 1000 -- per command: Lua's stack is limited
local MAX_BATCH = 65536 -- groups per call
local LARGEST = 9007199254740992 -- 2^53: integers up to here are exact in Lua

-- A stored number, or `otherwise` if it is not one. Other processes may have written anything: a loop
-- up to 'inf' or 1e300 would never end.
local function finite(text, otherwise)
  local number = tonumber(text or nil)
  if number and number >= -LARGEST and number <= LARGEST then return number end
  return otherwise
end

local function whole(number) return string.format('%.0f', number) end

-- The requested bound of work, limited to MAX_ITEMS.
local function bound_of(text) return math.max(1, math.min(math.floor(finite(text, 1)), MAX_ITEMS)) end

-- Ends the call with an error: the run cannot continue without this value.
local function damaged(what) error({err = 'DAMAGED ' .. what .. ' cannot be read'}) end

local held_settings = redis.call('HMGET', SETTINGS, 'trainer_version', 'max_staleness', 'on_stale',
  'selector', 'wanted', 'lineage', 'reconciling', 'audit_length', 'paused')
if not held_settings[1] then return redis.error_reply('NOTOPEN no settings at ' .. SETTINGS) end
local on_stale, selector, wanted = held_settings[3], held_settings[4], finite(held_settings[5], 0)
local lineage = held_settings[6]
local is_paused = held_settings[9] == 'True'
local is_reconciling = held_settings[7] == '1' -- ready groups may have versions from before a rollback

local settings_read = {}
local function setting(name)
  local value = settings_read[name] or finite(redis.call('HGET', SETTINGS, name))
  settings_read[name] = value
  return value or damaged('settings.' .. name)
end

local now
local function now_ms()
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return now
end

-- A command with any number of items.
local function call_many(command, name, items)
  for first = 1, #items, MAX_ITEMS do
    redis.call(command, name, unpack(items, first, math.min(first + MAX_ITEMS - 1, #items)))
  end
end

-- Counters and wake-ups of a call are collected here and written once, by settle().
local counts, wakes, is_batch_due = {}, {}, false

local function count(name, amount)
  if amount ~= 0 then counts[name] = (counts[name] or 0) + amount end
end

-- Wake streams keep only their last entry: a waiter remembers the id that it read before its condition
-- failed, and blocks in XREAD until there is a later one. So no wake-up is lost, nor consumed by a
-- waiter that dies.
local function wake(name) wakes[name] = true end

-- A lease that found too few groups stores its number in `wanted`; fewer ready groups wake no lease.
local function wake_batch() is_batch_due = true end

-- The key of a wake stream and its last entry: what a waiter waits behind.
local function last_wake(name)
  local newest = redis.call('XREVRANGE', key('wake:' .. name), '+', '-', 'COUNT', '1')
  return {key('wake:' .. name), newest[1] and newest[1][1] or '0-0'}
end

local function settle()
  local names, values = {}, {}
  for name in pairs(counts) do names[#names + 1] = name end
  if #names > 0 then
    local before = redis.call('HMGET', STATS, unpack(names))
    for i, name in ipairs(names) do
      local total = finite(before[i], 0) + counts[name]
      values[2 * i - 1], values[2 * i] = name, whole(finite(total, 0))
    end
    redis.call('HSET', STATS, unpack(values))
  end
  if is_batch_due and wanted ~= 0 and redis.call('ZCARD', READY) >= wanted then wake('batch') end
  for name in pairs(wakes) do redis.call('XADD', key('wake:' .. name), 'MAXLEN', '1', '*', 'w', '1') end
end
