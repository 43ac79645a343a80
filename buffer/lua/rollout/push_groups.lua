-- Commits groups whose payloads the client has just SET with an expiry.
-- ARGV: bound of evictions; then for each group: id, min_version, max_version, versions, tokens, pairs of
--       tokens, trainable tokens, bytes, task, index, attempt, further chunks, ms that the push was blocked.
-- Reply: for each group {'stored'} | {'duplicate'} | {'stale'} | {'abandoned_lineage'}
--      | {'missing'} (the payload is gone: send it again) | {'again'} (more to evict)
--      | {'full' or 'too_large', groups, bytes, capacity in groups, in bytes, on_full}
-- @include lib/audit
-- @include lib/capacity
-- @include lib/drop
-- @include lib/group
-- @include lib/leash
-- @include lib/lineage
-- @include lib/ready
-- @include lib/running
-- @include lib/tombstones
local bound, num_evicted = bound_of(ARGV[1]), 0
local rules = redis.call('HMGET', SETTINGS, 'sequence', 'gaps', 'num_gaps', 'capacity_groups',
  'capacity_bytes', 'on_full')
local sequence, gaps = finite(rules[1], 0), rules[2] ~= '' and parse_gaps(rules[2])
if gaps and not gaps[1] then damaged('settings.gaps') end
local max_groups, max_bytes = finite(rules[4], math.huge), finite(rules[5], math.huge)
local pushed_at, replies, arrived, num_stored = whole(now_ms()), {}, {}, 0

-- Writes that all groups of the call need are collected and done once.
local places, orders, audit_ids = {}, {}, {}
local function enter()
  if #places == 0 then return end
  enter_ready(places, orders)
  for version, ids in pairs(audit_ids) do audit(ids, 'pushed', 'v', version) end
  places, orders, audit_ids = {}, {}, {}
end

-- Ready and leased groups. Consumed ones do not count, or a trainer could wait for itself.
local groups_before, bytes_before
if max_groups < math.huge or max_bytes < math.huge then
  local held = redis.call('HMGET', STATS, 'bytes', 'bytes_consumed', 'bytes_quarantined')
  bytes_before = finite(held[1], 0) - finite(held[2], 0) - finite(held[3], 0)
  groups_before = redis.call('ZCARD', READY) + redis.call('ZCARD', LEASED)
end
local function used_groups() return groups_before + num_stored - num_evicted end
local function used_bytes() return bytes_before + (counts.bytes or 0) end
local function is_full(num_bytes)
  return groups_before and (used_groups() + 1 > max_groups or used_bytes() + num_bytes > max_bytes)
end

-- Evicts the stalest groups; returns whether it stopped at the bound.
local function make_room(num_bytes)
  enter() -- the stalest may be one of this call
  for _, stalest in ipairs(redis.call('ZRANGE', READY, '0', bound - 1)) do
    if not is_full(num_bytes) or num_evicted == bound then break end
    leave_ready({stalest})
    drop({stalest}, 'full')
    num_evicted = num_evicted + 1
  end
  return num_evicted == bound and is_full(num_bytes)
end

local function commit(id, min_text, max_text, before, tokens, num_pairs, trainable, bytes, task, index,
                      attempt, num_chunks, blocked_ms)
  local min_version, max_version, versions = tonumber(min_text), tonumber(max_text), before
  local num_bytes, name, payload = tonumber(bytes), group_key(id), payload_keys(id, num_chunks)

  local state = fields_of(id, 'state')[1]
  if state then
    -- The retry's SET NX did nothing for a stored group; for a tombstone it created an orphan.
    if is_tombstone(state) then unlink(payload) end
    arrived[#arrived + 1] = id
    return {'duplicate'}
  end

  local function arrive()
    arrived[#arrived + 1] = id
    count('pushed', 1)
    count('tokens_pushed', tokens)
    if blocked_ms ~= '0' then
      count('push_blocked', 1)
      count('push_blocked_ms', blocked_ms)
    end
  end

  local function refuse(reason)
    arrive()
    audit({id}, 'pushed', 'v', min_text)
    unlink(payload)
    leave_tombstones({id}, 'dropped:' .. reason)
    local prompt = {tokens = tonumber(tokens), trainable = tonumber(trainable), task = task, index = index,
      attempt = tonumber(attempt), reruns = 0}
    count_drops({id}, reason, {prompt})
  end

  local function full(word)
    unlink(payload)
    local function limit(number) return number < math.huge and whole(number) or '' end
    return {word, used_groups(), used_bytes(), limit(max_groups), limit(max_bytes),
      rules[6] or 'block'}
  end

  if gaps and min_version < gaps[#gaps].resume then
    versions, min_version, max_version = renumber_all(before, gaps, 1)
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

  if num_bytes > max_bytes then return full('too_large') end
  if is_full(num_bytes) then
    local can_evict = rules[6] == 'drop_stalest' and fits_beside_leased(num_bytes, max_groups, max_bytes)
    if can_evict and make_room(num_bytes) then return {'again'} end
    if is_full(num_bytes) then
      if blocked_ms == '0' then audit({id}, 'full') end
      return full('full')
    end
  end

  if #payload > 1 then
    if redis.call('EXISTS', unpack(payload)) < #payload then return {'missing'} end
    for _, chunk in ipairs(payload) do redis.call('PERSIST', chunk) end
  elseif redis.call('PERSIST', payload[1]) == 0 and redis.call('EXISTS', payload[1]) == 0 then
    return {'missing'}
  end

  -- Fields with their default value are left out, so that the hash stays one small block.
  sequence = sequence + 1
  local seq = sequence % SEQ_RANGE
  local group = {'state', 'ready', 'seq', seq, 'min_version', whole(min_version), 'tokens', tokens,
    'pairs', num_pairs, 'trainable', trainable, 'bytes', bytes, 'task', task, 'index', index,
    'pushed_at', pushed_at}
  local function add(field, value)
    group[#group + 1] = field
    group[#group + 1] = value
  end
  if versions ~= before or max_version > min_version then
    add('versions', versions)
    add('max_version', whole(max_version))
  end
  if versions ~= before then add('moved', '1') end
  if gaps then add('gaps', rules[3]) end
  if attempt ~= '0' then add('attempt', attempt) end
  if num_chunks ~= '0' then add('chunks', num_chunks) end
  redis.call('HSET', name, unpack(group))

  arrive()
  count('bytes', num_bytes)
  count('tokens', tokens)
  places[#places + 1], orders[#orders + 1] = whole(gate * SEQ_RANGE + seq), order_of(seq, trainable)
  places[#places + 1], orders[#orders + 1] = id, id
  local version = whole(min_version)
  audit_ids[version] = audit_ids[version] or {}
  table.insert(audit_ids[version], id)
  num_stored = num_stored + 1
  return {'stored'}
end

for i = 2, #ARGV, 13 do replies[#replies + 1] = commit(unpack(ARGV, i, i + 12)) end
enter()
if #arrived > 0 then leave_running(arrived) end
if num_stored > 0 then
  redis.call('HSET', SETTINGS, 'sequence', whole(sequence))
  wake_batch()
end
return replies
