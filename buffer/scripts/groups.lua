-- The library: how groups move between states. A group is ready at its gate version: that of its oldest
-- trainable token, or of its newest with on_stale=mask_tokens, where older tokens are masked instead.

local function gate_of(min_version, max_version)
  return tonumber(on_stale == 'mask_tokens' and max_version or min_version)
end

-- Oldest version that is trained when tokens before `masked_below` (nil: none) are masked, and how
-- many those are.
local function oldest_trained(min_version, versions, trainable, masked_below)
  if not masked_below or tonumber(min_version) >= masked_below then return tonumber(min_version), 0 end
  local masked = 0
  for version, tokens in string.gmatch(versions or '', '(%d+):(%d+)') do -- ascending
    if tonumber(version) >= masked_below then return tonumber(version), masked end
    masked = masked + tokens
  end
  return masked_below, trainable -- nothing is left of it
end

local function enter_ready(id, gate, seq)
  redis.call('ZADD', READY, whole(gate * SEQ_RANGE + seq), id)
  if selector == 'fifo' then redis.call('ZADD', ARRIVALS, seq, id) end
end

local function leave_ready(ids)
  call_many('ZREM', READY, ids)
  if selector == 'fifo' then call_many('ZREM', ARRIVALS, ids) end
end

-- Payloads above 64 MB have further chunks at 'payload:<id>:1' and on.
local function payload_keys(id, num_chunks)
  local names = {payload_key(id)}
  for i = 1, tonumber(num_chunks or 0) do names[i + 1] = names[1] .. ':' .. i end
  return names
end

local function leave_tombstone(id, state)
  redis.call('HSET', group_key(id), 'state', state)
  redis.call('PEXPIRE', group_key(id), math.ceil(1000 * setting('remember_s')))
end

-- Turns a group that no set holds any more into a tombstone; returns its bytes and its prompt.
local function bury(id, state)
  local name = group_key(id)
  local group = redis.call('HMGET', name, 'bytes', 'tokens', 'chunks', 'task', 'index', 'attempt')
  redis.call('UNLINK', name, unpack(payload_keys(id, group[3])))
  leave_tombstone(id, state)
  count('bytes', -group[1])
  count('tokens', -group[2])
  return {bytes = group[1], tokens = tonumber(group[2]), task = group[4], index = group[5],
    attempt = tonumber(group[6] or 0)}
end

-- Puts a prompt in line again. A retry is counted, and they end, unless it went for no fault of its own.
local function requeue(task, index, attempt, is_counted)
  if on_stale ~= 'requeue' then return end
  if is_counted and attempt >= setting('max_retries') then return count('retries_exhausted', 1) end
  redis.call('RPUSH', RETRIES, (is_counted and attempt + 1 or attempt) .. ' ' .. index .. ' ' .. task)
  count('requeued', 1)
end

local function length_of(tokens)
  return tokens <= 1024 and '<=1k' or tokens <= 4096 and '<=4k' or tokens <= 16384 and '<=16k'
    or tokens <= 65536 and '<=64k' or '>64k'
end

-- Counts a drop; a stale or rolled back prompt is run again, one that was thrown out is not.
local function count_drop(id, reason, prompt)
  count('dropped:' .. reason, 1)
  count('dropped_tokens:' .. reason, prompt.tokens)
  count('dropped_len:' .. length_of(prompt.tokens), 1)
  if reason == 'stale' or reason == 'lineage' then
    requeue(prompt.task, prompt.index, prompt.attempt, reason == 'stale')
  end
  wake('room')
  audit(id, 'dropped', 'r', reason)
end

local function drop(id, reason) count_drop(id, reason, bury(id, 'dropped:' .. reason)) end

local function to_quarantine(id, reason, num_bytes)
  redis.call('ZADD', QUARANTINED, whole(now_ms()), id)
  redis.call('HSET', group_key(id), 'state', 'quarantined', 'owner', '', 'why', reason)
  count('bytes_quarantined', num_bytes)
  wake('room')
  audit(id, 'quarantined', 'r', reason)
end

-- The fence: the group is leased, and by this owner. After a rollback all owners are of the past.
local function is_held(id, owner)
  if is_reconciling then return false end
  local held = redis.call('HMGET', group_key(id), 'state', 'owner')
  return held[1] == 'leased' and held[2] == owner
end

-- A group that is in no set at this moment goes back to ready; `event` says why.
local function to_ready(id, event, ...)
  local group = redis.call('HMGET', group_key(id), 'min_version', 'max_version', 'seq')
  enter_ready(id, gate_of(group[1], group[2]), group[3])
  redis.call('HSET', group_key(id), 'state', 'ready', 'owner', '')
  audit(id, event, ...)
  wake_batch()
end

-- leased -> ready, or quarantine if it was leased so often and never trained. Returns whether ready.
local function return_leased(id, event, ...)
  redis.call('ZREM', LEASED, id)
  local group = redis.call('HMGET', group_key(id), 'leases', 'bytes')
  if tonumber(group[1]) < setting('max_attempts') then
    to_ready(id, event, ...)
    wake('room') -- with on_full=drop_stalest it may make way
    return true
  end
  audit(id, event, ...)
  to_quarantine(id, 'attempts', group[2])
  return false
end

-- Drops at most `limit` ready groups that training version `version` may not use any more.
local function drop_stale_ready(version, limit)
  if is_reconciling then return 0 end
  local cutoff = '(' .. whole(oldest_fresh(version) * SEQ_RANGE)
  local stale = redis.call('ZRANGE', READY, '-inf', cutoff, 'BYSCORE', 'LIMIT', '0', limit)
  if #stale > 0 then leave_ready(stale) end
  for _, id in ipairs(stale) do drop(id, 'stale') end
  return #stale
end

-- Returns at most `limit` groups to ready whose lease nobody renewed in time.
local function expire_leases(limit)
  local now = whole(now_ms())
  local expired = redis.call('ZRANGE', LEASED, '-inf', now, 'BYSCORE', 'LIMIT', '0', limit)
  for _, id in ipairs(expired) do return_leased(id, 'expired') end
  count('expired', #expired)
  return #expired
end
