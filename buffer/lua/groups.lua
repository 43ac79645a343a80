-- The library: how groups move between states. A group is ready at its gate version: that of its oldest
-- trainable token, or of its newest with on_stale=mask_tokens, where older tokens are masked instead.

local function gate_of(min_version, max_version)
  return finite(on_stale == 'mask_tokens' and max_version or min_version)
end

-- These fields of a group's hash. Of one that was overwritten with something else nothing is left.
local function fields_of(id, ...)
  local fields = redis.pcall('HMGET', group_key(id), ...)
  if not fields.err then return fields end
  if string.sub(fields.err, 1, 9) ~= 'WRONGTYPE' then error(fields) end
  redis.call('UNLINK', group_key(id))
  return {}
end

-- Oldest version that is trained when tokens before `masked_below` (nil: none) are masked, and how
-- many those are.
local function oldest_trained(min_version, versions, trainable, masked_below)
  if not masked_below or finite(min_version, 0) >= masked_below then return finite(min_version, 0), 0 end
  local masked = 0
  for version, tokens in string.gmatch(versions or '', '(%d+):(%d+)') do -- ascending
    if finite(version, 0) >= masked_below then return finite(version, 0), masked end
    masked = masked + finite(tokens, 0)
  end
  return masked_below, trainable -- nothing is left of it
end

-- `places` are the groups' scores in `ready` and ids, score, id...; `seqs` their numbers and ids alike.
local function enter_ready(places, seqs)
  call_many('ZADD', READY, places)
  if selector == 'fifo' then call_many('ZADD', ARRIVALS, seqs) end
end

local function leave_ready(ids)
  call_many('ZREM', READY, ids)
  if selector == 'fifo' then call_many('ZREM', ARRIVALS, ids) end
end

-- Payloads above 64 MB have further chunks at 'payload:<id>:1' and on.
local function payload_keys(id, num_chunks)
  local names = {payload_key(id)}
  for i = 1, math.min(finite(num_chunks, 0), MAX_ITEMS) do names[i + 1] = names[1] .. ':' .. i end
  return names
end

local function is_buried(state)
  return state == 'acked' or state == 'abandoned' or string.sub(state, 1, 8) == 'dropped:'
end

local function leave_tombstones(ids, state)
  local remember_ms = math.ceil(1000 * setting('remember_s'))
  for _, id in ipairs(ids) do
    local name = group_key(id)
    redis.call('HSET', name, 'state', state)
    redis.call('PEXPIRE', name, remember_ms)
  end
end

-- Turns groups that no set holds any more into tombstones; returns their bytes and, of each, its
-- tokens, those of them that can be trained, and its prompt.
local function bury(ids, state)
  local buried, doomed, total_bytes, total_tokens = {}, {}, 0, 0
  for i, id in ipairs(ids) do
    local name = group_key(id)
    local group = fields_of(id, 'bytes', 'tokens', 'chunks', 'task', 'index', 'attempt', 'trainable')
    local tokens = finite(group[2], 0)
    total_bytes, total_tokens = total_bytes + finite(group[1], 0), total_tokens + tokens
    doomed[#doomed + 1] = name
    for _, payload in ipairs(payload_keys(id, group[3])) do doomed[#doomed + 1] = payload end
    buried[i] = {tokens = tokens, trainable = finite(group[7], 0), task = group[4],
      index = group[5], attempt = finite(group[6], 0), reruns = 0}
  end
  unlink(doomed)
  leave_tombstones(ids, state)
  count('bytes', -total_bytes)
  count('tokens', -total_tokens)
  return total_bytes, buried
end

-- A prompt as `retries` and `prompts` hold it: 'attempt index task', or 'attempt+reruns index task' if
-- a worker died over it.
local function write_prompt(prompt)
  local reruns = prompt.reruns > 0 and '+' .. whole(prompt.reruns) or ''
  return whole(prompt.attempt) .. reruns .. ' ' .. prompt.index .. ' ' .. prompt.task
end

-- nil if the text is none.
local function read_prompt(text)
  local attempt, reruns, index, task = string.match(text, '^(%d+)%+?(%d*) (%d+) (.*)$')
  local prompt = {attempt = finite(attempt), reruns = finite(reruns, 0), index = index, task = task}
  local fits = prompt.attempt and prompt.attempt < SEQ_RANGE and #index < 20 -- as in the wire format
  return fits and prompt or nil
end

-- Puts a prompt in line again. A retry is counted, and they end, unless it went for no fault of its own.
local function requeue(prompt, is_counted)
  if on_stale ~= 'requeue' or not (prompt.task and prompt.index) then return end
  if is_counted then
    if prompt.attempt >= setting('max_retries') then return count('retries_exhausted', 1) end
    prompt.attempt = prompt.attempt + 1
  end
  redis.call('RPUSH', RETRIES, write_prompt(prompt))
  count('requeued', 1)
end

-- A prompt that ends whoever runs it is put aside until somebody looks at it; `id` is its last group.
local function quarantine_prompt(id, prompt, reason, times)
  redis.call('HSET', POISONOUS, prompt.index .. ' ' .. prompt.task,
    whole(now_ms()) .. ' ' .. whole(times) .. ' ' .. reason)
  count('prompts_quarantined:' .. reason, 1)
  audit({id}, 'prompt_quarantined', 'r', reason)
end

-- Whoever ran these groups is gone. Their prompts run again, but only once for this reason; the groups
-- themselves end, also if they are pushed after all.
local function lose_running(ids, reason)
  local prompts, lost = redis.call('HMGET', PROMPTS, unpack(ids)), {}
  leave_running(ids)
  audit(ids, 'abandoned', 'r', reason)
  count('abandoned:' .. reason, #ids)
  for i, id in ipairs(ids) do
    local prompt = prompts[i] and read_prompt(prompts[i])
    if prompt then
      lost[#lost + 1] = id
      prompt.reruns = prompt.reruns + 1
      if prompt.reruns > 1 then quarantine_prompt(id, prompt, 'worker_died', prompt.reruns)
      else
        redis.call('RPUSH', RETRIES, write_prompt(prompt))
        count('rerun', 1)
        audit({id}, 'rerun')
      end
    end
  end
  leave_tombstones(lost, 'abandoned')
  wake('room')
end

local function length_of(tokens)
  return tokens <= 1024 and '<=1k' or tokens <= 4096 and '<=4k' or tokens <= 16384 and '<=16k'
    or tokens <= 65536 and '<=64k' or '>64k'
end

-- Counts drops; a stale or rolled back prompt is run again, one that was thrown out is not.
local function count_drops(ids, reason, prompts)
  local tokens, trainable = 0, 0
  for _, prompt in ipairs(prompts) do
    tokens, trainable = tokens + prompt.tokens, trainable + prompt.trainable
    count('dropped_len:' .. length_of(prompt.tokens), 1)
    if reason == 'stale' or reason == 'lineage' then
      requeue(prompt, reason == 'stale')
    end
  end
  count('dropped:' .. reason, #prompts)
  count('dropped_tokens:' .. reason, tokens)
  count('tokens_dropped', trainable)
  wake('room')
  audit(ids, 'dropped', 'r', reason)
end

local function drop(ids, reason)
  if #ids == 0 then return end
  local _, prompts = bury(ids, 'dropped:' .. reason)
  count_drops(ids, reason, prompts)
end

local function to_quarantine(id, reason, num_bytes)
  redis.call('ZADD', QUARANTINED, whole(now_ms()), id)
  redis.call('HSET', group_key(id), 'state', 'quarantined', 'owner', '', 'why', reason)
  count('bytes_quarantined', finite(num_bytes, 0))
  wake('room')
  audit({id}, 'quarantined', 'r', reason)
end

-- A group whose hash was deleted or overwritten, and that no set holds at this moment: what is left of
-- it is kept for somebody to look at.
local function set_aside(id)
  local group = fields_of(id, 'bytes', 'tokens')
  if not (finite(group[1]) and finite(group[2])) then -- the counters of what is held must not drift
    local payload = redis.pcall('STRLEN', payload_key(id))
    local num_bytes = type(payload) == 'number' and payload or 0
    redis.call('HSET', group_key(id), 'bytes', num_bytes, 'tokens', '0')
    group[1] = num_bytes
  end
  to_quarantine(id, 'damaged', group[1])
end

-- The fence: the group is leased, and by this owner. After a rollback all owners are of the past.
local function is_held(id, owner)
  if is_reconciling then return false end
  local held = fields_of(id, 'state', 'owner')
  return held[1] == 'leased' and held[2] == owner
end

-- A group that is in no set at this moment goes back to ready; `event` says why. Returns whether it
-- could.
local function to_ready(id, event, ...)
  local group = fields_of(id, 'min_version', 'max_version', 'seq')
  local gate, seq = gate_of(group[1], group[2]), finite(group[3])
  if not (gate and seq) then
    set_aside(id)
    return false
  end
  enter_ready({whole(gate * SEQ_RANGE + seq), id}, {group[3], id})
  redis.call('HSET', group_key(id), 'state', 'ready', 'owner', '')
  audit({id}, event, ...)
  wake_batch()
  return true
end

-- leased -> ready, or quarantine if it was leased so often and never trained. Returns whether ready.
local function return_leased(id, event, ...)
  redis.call('ZREM', LEASED, id)
  local group = fields_of(id, 'leases', 'bytes')
  if finite(group[1], 0) < setting('max_attempts') then
    wake('room') -- with on_full=drop_stalest it may make way
    return to_ready(id, event, ...)
  end
  audit({id}, event, ...)
  to_quarantine(id, 'attempts', group[2])
  return false
end

-- Drops at most `limit` ready groups that training version `version` may not use any more.
local function drop_stale_ready(version, limit)
  if is_reconciling then return 0 end
  local cutoff = '(' .. whole(oldest_fresh(version) * SEQ_RANGE)
  local stale = redis.call('ZRANGE', READY, '-inf', cutoff, 'BYSCORE', 'LIMIT', '0', limit)
  if #stale > 0 then leave_ready(stale) end
  drop(stale, 'stale')
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

-- Whether a group would fit if all that is ready were thrown out; at most some batches are leased.
local function fits_beside_leased(num_bytes, max_groups, max_bytes)
  local num_leased = redis.call('ZCARD', LEASED)
  if num_leased + 1 > max_groups or num_leased > MAX_BATCH then return false end
  if max_bytes == math.huge then return true end
  local total = num_bytes
  for _, id in ipairs(redis.call('ZRANGE', LEASED, '0', '-1')) do
    total = total + finite(fields_of(id, 'bytes')[1], 0)
  end
  return total <= max_bytes
end
