-- Commits a group whose payload the client has just SET with an expiry.
-- ARGV: group id, min_version, max_version, versions, tokens, trainable tokens, bytes, task, index,
--       attempt, further chunks, ms that the push was blocked, bound of evictions.
-- Reply: {'stored'} | {'duplicate'} | {'stale'} | {'abandoned_lineage'}
--      | {'missing'} (the payload is gone: send it again) | {'again'} (more to evict)
--      | {'full' or 'too_large', last wake id, groups, bytes, capacity in groups, in bytes, on_full}
local id, versions, tokens, num_bytes = ARGV[1], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[7])
local min_version, max_version = tonumber(ARGV[2]), tonumber(ARGV[3])
local payload = payload_keys(id, ARGV[11])

local state = redis.call('HGET', group_key(id), 'state')
if state then
  -- The retry's SET NX did nothing for a living group; for a buried one it made a new orphan.
  if state == 'acked' or string.sub(state, 1, 8) == 'dropped:' then redis.call('UNLINK', unpack(payload)) end
  leave_running(id)
  return {'duplicate'}
end

local function arrive()
  leave_running(id)
  count('pushed', 1)
  count('tokens_pushed', tokens)
  if ARGV[12] ~= '0' then
    count('push_blocked', 1)
    count('push_blocked_ms', ARGV[12])
  end
end

local function refuse(reason)
  arrive()
  audit(id, 'pushed', 'v', ARGV[2])
  redis.call('UNLINK', unpack(payload))
  leave_tombstone(id, 'dropped:' .. reason)
  count_drop(id, reason, {tokens = tokens, task = ARGV[8], index = ARGV[9], attempt = tonumber(ARGV[10])})
end

local rules = redis.call('HMGET', SETTINGS, 'gaps', 'num_gaps', 'capacity_groups', 'capacity_bytes',
  'on_full')
local before = versions
local gaps = rules[1] ~= '' and parse_gaps(rules[1])
if gaps and min_version < gaps[#gaps].resume then
  versions, min_version, max_version = renumber_all(versions, gaps, 1)
  if not versions then
    refuse('lineage')
    return {'abandoned_lineage'}
  end
end
local gate = gate_of(min_version, max_version)
if gate < oldest_fresh(trainer_version) then
  refuse('stale')
  return {'stale'}
end

-- Capacity: what is ready or leased. Consumed groups do not count, or a trainer could wait for itself.
if rules[3] ~= '' or rules[4] ~= '' then
  local max_groups, max_bytes = tonumber(rules[3]) or math.huge, tonumber(rules[4]) or math.huge
  local held = redis.call('HMGET', STATS, 'bytes', 'bytes_consumed', 'bytes_quarantined')
  local outside = (held[2] or 0) + (held[3] or 0)
  local num_groups = redis.call('ZCARD', READY) + redis.call('ZCARD', LEASED)
  local function used_bytes() return (held[1] or 0) - outside + (counts.bytes or 0) end
  local function is_full() return num_groups + 1 > max_groups or used_bytes() + num_bytes > max_bytes end
  local function refusal(word)
    redis.call('UNLINK', unpack(payload))
    return {word, last_wake('room'), num_groups, used_bytes(), rules[3], rules[4], rules[5]}
  end
  if num_bytes > max_bytes then return refusal('too_large') end
  if is_full() and rules[5] == 'drop_stalest' then
    local num_evicted, bound = 0, tonumber(ARGV[13])
    for _, stalest in ipairs(redis.call('ZRANGE', READY, '0', bound - 1)) do
      if not is_full() then break end
      leave_ready({stalest})
      drop(stalest, 'full')
      num_groups, num_evicted = num_groups - 1, num_evicted + 1
    end
    if is_full() and num_evicted == bound then return {'again'} end
  end
  if is_full() then
    if ARGV[12] == '0' then audit(id, 'full') end
    return refusal('full')
  end
end

if #payload > 1 then
  if redis.call('EXISTS', unpack(payload)) < #payload then return {'missing'} end
  for _, name in ipairs(payload) do redis.call('PERSIST', name) end
elseif redis.call('PERSIST', payload[1]) == 0 and redis.call('EXISTS', payload[1]) == 0 then
  return {'missing'}
end

-- Few and short fields: what has its usual value is left out, and the hash stays one small block.
local group = {'state', 'ready', 'seq', redis.call('HINCRBY', SETTINGS, 'sequence', 1) % SEQ_RANGE,
  'min_version', whole(min_version), 'tokens', ARGV[5], 'trainable', ARGV[6], 'bytes', ARGV[7],
  'task', ARGV[8], 'index', ARGV[9], 'pushed_at', whole(now_ms())}
local function add(name, value)
  group[#group + 1] = name
  group[#group + 1] = value
end
if versions ~= before or max_version > min_version then
  add('versions', versions)
  add('max_version', whole(max_version))
end
if versions ~= before then add('moved', '1') end
if gaps then add('gaps', rules[2]) end
if ARGV[10] ~= '0' then add('attempt', ARGV[10]) end
if ARGV[11] ~= '0' then add('chunks', ARGV[11]) end
redis.call('HSET', group_key(id), unpack(group))
arrive()
count('bytes', num_bytes)
count('tokens', tokens)
enter_ready(id, gate, group[4])
audit(id, 'pushed', 'v', whole(min_version))
wake_batch()
return {'stored'}
