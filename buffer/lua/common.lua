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
--   ready | leased | consumed | quarantined | acked | dropped:<reason> | abandoned
-- and agrees at every moment with the one set that holds the group. The last three are tombstones:
-- nothing but the state, kept for a while so that a late retry of a push is known as a duplicate.
-- (Of the abandoned only those have one whose prompts run again while a push may still be on its way.)

local PREFIX = KEYS[1] .. ':'
local function key(name) return PREFIX .. name end
local function group_key(id) return PREFIX .. 'group:' .. id end
local function payload_key(id) return PREFIX .. 'payload:' .. id end
local function lease_key(step) return PREFIX .. 'lease:' .. step end

local SETTINGS = PREFIX .. 'settings'
local STATS = PREFIX .. 'stats'
local EVENTS = PREFIX .. 'events'
local RUNNING = PREFIX .. 'running'
local CREDITS = PREFIX .. 'credits'
local READY = PREFIX .. 'ready'
local ARRIVALS = PREFIX .. 'arrivals'
local LEASED = PREFIX .. 'leased'
local CONSUMED = PREFIX .. 'consumed'
local QUARANTINED = PREFIX .. 'quarantined'
local RETRIES = PREFIX .. 'retries'
local PROMPTS = PREFIX .. 'prompts'
local FAILURES = PREFIX .. 'failures'
local POISONOUS = PREFIX .. 'quarantined_prompts'
local TASKS = PREFIX .. 'tasks'
local BATCHES = PREFIX .. 'batches'
local ENGINES = PREFIX .. 'engine_versions'
local GATE = PREFIX .. 'commit_gate'

local sets_of_groups = {ready = READY, leased = LEASED, consumed = CONSUMED, quarantined = QUARANTINED}

local SEQ_RANGE = 4294967296 -- 2^32: `ready` is scored gate version * 2^32 + sequence number
local MAX_ITEMS = 1000 -- of one command: Lua's stack does not take any number
local MAX_TOLD = 32 -- groups in one entry of the audit stream
local MAX_BATCH = 65536 -- groups of one call, whatever it is asked for
local LARGEST = 9007199254740992 -- 2^53: up to here Lua counts exactly

-- A number that the server holds; `otherwise` if it is none. Whoever may write to the run's keys may
-- write anything there: 'inf' and 1e300 end no loop that counts up to them.
local function finite(text, otherwise)
  local number = tonumber(text or nil)
  if number and number >= -LARGEST and number <= LARGEST then return number end
  return otherwise
end

-- How much work a call may do, of what it asks for.
local function bound_of(text) return math.max(1, math.min(math.floor(finite(text, 1)), MAX_ITEMS)) end

-- Ends the call: without this the run cannot go on as it should.
local function damaged(what) error({err = 'DAMAGED ' .. what .. ' cannot be read'}) end

local held_settings = redis.call('HMGET', SETTINGS, 'trainer_version', 'max_staleness', 'on_stale',
  'selector', 'wanted', 'audit_length', 'lineage', 'reconciling')
if not held_settings[1] then return redis.error_reply('NOTOPEN no settings at ' .. SETTINGS) end
local trainer_version = finite(held_settings[1]) or damaged('settings.trainer_version')
local max_staleness = finite(held_settings[2]) or damaged('settings.max_staleness')
local on_stale, selector, wanted = held_settings[3], held_settings[4], finite(held_settings[5], 0)
local audit_length, lineage = finite(held_settings[6], 0), held_settings[7]
local is_reconciling = held_settings[8] == '1' -- ready groups may bear numbers of before the rollback
if #ARGV > 2 * MAX_BATCH then return redis.error_reply('ERR too many arguments') end

local settings_read = {}
local function setting(name)
  local value = settings_read[name] or finite(redis.call('HGET', SETTINGS, name))
  settings_read[name] = value
  return value or damaged('settings.' .. name)
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

-- A command with any number of items.
local function call_many(command, name, items)
  for first = 1, #items, MAX_ITEMS do
    redis.call(command, name, unpack(items, first, math.min(first + MAX_ITEMS - 1, #items)))
  end
end

local function unlink(names)
  for first = 1, #names, MAX_ITEMS do
    redis.call('UNLINK', unpack(names, first, math.min(first + MAX_ITEMS - 1, #names)))
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

-- Groups are running no more; returns how many were. With on_stale=wait a lease may have waited for
-- one, here or at another shard.
local function leave_running(ids)
  local num_running = redis.call('ZREM', RUNNING, unpack(ids))
  if num_running > 0 then
    redis.call('ZREM', CREDITS, unpack(ids))
    redis.call('HDEL', PROMPTS, unpack(ids))
  end
  if on_stale == 'wait' and wanted ~= 0 then wake('batch') end
  return num_running
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

local function last_wake(name)
  local newest = redis.call('XREVRANGE', key('wake:' .. name), '+', '-', 'COUNT', '1')
  return newest[1] and newest[1][1] or '0-0'
end

-- A line in the lives of some groups, for `make trace`; they share entries, for an entry costs more
-- than a name in it. There are about four lines an entry in a run's usual mix of single groups and
-- whole batches. Details come as name, value: s(tep) v(ersion) r(eason) o(wner).
local function audit(ids, event, ...)
  if audit_length == 0 then return end
  local max_entries = whole(math.max(0, math.ceil(audit_length / 4)))
  for first = 1, #ids, MAX_TOLD do
    redis.call('XADD', EVENTS, 'MAXLEN', '~', max_entries, '*',
      'g', table.concat(ids, ' ', first, math.min(first + MAX_TOLD - 1, #ids)), 'e', event, ...)
  end
end

local function oldest_fresh(version) return version - max_staleness end
