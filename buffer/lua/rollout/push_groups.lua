-- Commits groups whose payloads the client has just SET with an expiry.
-- Request: bound (of evictions), groups (a list of PushedGroup).
-- Reply: a PushReply for each: 'stored' | 'duplicate' | 'stale' | 'abandoned_lineage'
--      | 'missing' (the payload is gone: send it again) | 'again' (more to evict)
--      | 'full' or 'too_large', groups, bytes, capacity in groups, in bytes, on_full
local bound, num_evicted = bound_of(request.bound), 0
local rules = redis.call('HMGET', SETTINGS, 'sequence', 'rollbacks', 'num_rollbacks', 'capacity_groups',
  'capacity_bytes', 'on_full')
local sequence, rollbacks = finite(rules[1], 0), rules[2] ~= '' and parse_rollbacks(rules[2])
if rollbacks and not rollbacks[1] then damaged('settings.rollbacks') end
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

local function commit(pushed)
  local id, num_bytes, trainable = pushed.group_id, pushed.bytes, pushed.trainable
  local min_version, max_version, versions = pushed.min_version, pushed.max_version, pushed.versions
  local payload = payload_keys(id, pushed.chunks)

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
    count('tokens_pushed', pushed.tokens)
    if pushed.blocked_ms > 0 then
      count('push_blocked', 1)
      count('push_blocked_ms', pushed.blocked_ms)
    end
  end

  local function refuse(reason)
    arrive()
    audit({id}, 'pushed', 'v', pushed.min_version)
    unlink(payload)
    leave_tombstones({id}, 'dropped:' .. reason)
    count_drops({id}, reason, {{tokens = pushed.tokens, trainable = trainable, task = pushed.task,
      index = pushed.index, attempt = pushed.attempt, reruns = 0}})
  end

  local function full(word)
    unlink(payload)
    local function limit(number) return number < math.huge and number end
    return {word, used_groups(), used_bytes(), limit(max_groups), limit(max_bytes),
      rules[6] or 'block'}
  end

  if rollbacks and min_version < rollbacks[#rollbacks].resume then
    versions, min_version, max_version = renumber_all(versions, rollbacks, 1)
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
      if pushed.blocked_ms == 0 then audit({id}, 'full') end
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
  local group = {'state', 'ready', 'seq', seq, 'min_version', min_version, 'tokens', pushed.tokens,
    'pairs', pushed.pairs, 'trainable', trainable, 'bytes', num_bytes, 'task', pushed.task,
    'index', pushed.index, 'pushed_at', pushed_at}
  local function add(field, value)
    group[#group + 1] = field
    group[#group + 1] = value
  end
  if versions ~= pushed.versions or max_version > min_version then
    add('versions', versions)
    add('max_version', max_version)
  end
  if versions ~= pushed.versions then add('renumbered', '1') end
  if rollbacks then add('rollbacks', rules[3]) end
  if pushed.attempt > 0 then add('attempt', pushed.attempt) end
  if pushed.chunks > 0 then add('chunks', pushed.chunks) end
  redis.call('HSET', group_key(id), unpack(group))

  arrive()
  count('bytes', num_bytes)
  count('tokens', pushed.tokens)
  places[#places + 1], orders[#orders + 1] = whole(gate * SEQ_RANGE + seq), order_of(seq, trainable)
  places[#places + 1], orders[#orders + 1] = id, id
  local version = whole(min_version)
  audit_ids[version] = audit_ids[version] or {}
  table.insert(audit_ids[version], id)
  num_stored = num_stored + 1
  return {'stored'}
end

for i, pushed in ipairs(request.groups) do replies[i] = commit(pushed) end
enter()
if #arrived > 0 then leave_running(arrived) end
if num_stored > 0 then
  redis.call('HSET', SETTINGS, 'sequence', whole(sequence))
  wake_batch()
end
return replies
