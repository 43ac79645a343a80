-- The library: choosing the groups of a batch, taking them, and the record of a step's batch.

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do found[#found + 1] = word end
  return found
end

-- on_stale=wait: the oldest running group that would be too old after a step at `version`.
local function blocking_group(version)
  if on_stale ~= 'wait' then return '', 0 end
  local oldest = redis.call('ZRANGE', RUNNING, '-inf', whole(oldest_fresh(version)), 'BYSCORE',
    'LIMIT', '0', '1', 'WITHSCORES')
  return oldest[1] or '', tonumber(oldest[2] or 0)
end

-- At most `limit` ready groups as the selector orders them, as id, key, id, key... (smaller first).
-- With on_stale=wait those that this is the last chance of come first, whatever the selector.
local function choose(version, limit)
  local chosen, seen = {}, {}
  local function add(found, offset, sign)
    for i = 1, #found, 2 do
      if not seen[found[i]] and #chosen < 2 * limit then
        seen[found[i]] = true
        chosen[#chosen + 1] = found[i]
        chosen[#chosen + 1] = whole(sign * found[i + 1] + offset)
      end
    end
  end
  if on_stale == 'wait' and selector ~= 'stalest' then
    local brink = '(' .. whole((oldest_fresh(version) + 1) * SEQ_RANGE)
    add(redis.call('ZRANGE', READY, '-inf', brink, 'BYSCORE', 'LIMIT', '0', limit, 'WITHSCORES'),
      -2 ^ 53, 1)
  end
  local last = limit - 1
  if selector == 'fifo' then add(redis.call('ZRANGE', ARRIVALS, '0', last, 'WITHSCORES'), 0, 1)
  elseif selector == 'freshest' then
    add(redis.call('ZRANGE', READY, '0', last, 'REV', 'WITHSCORES'), 0, -1)
  else add(redis.call('ZRANGE', READY, '0', last, 'WITHSCORES'), 0, 1) end
  return chosen
end

-- ready -> leased. Returns the tokens of each, and {id, versions...} of those that were renumbered.
local function take(ids, owner, deadline, step)
  local tokens, moved, deadlines = {}, {}, {}
  leave_ready(ids)
  for i, id in ipairs(ids) do
    local name = group_key(id)
    local group = redis.call('HMGET', name, 'tokens', 'leases', 'moved', 'versions')
    redis.call('HSET', name, 'state', 'leased', 'owner', owner, 'leases', tonumber(group[2] or 0) + 1)
    tokens[i] = group[1]
    if group[3] then
      moved[#moved + 1] = id
      moved[#moved + 1] = group[4]
    end
    deadlines[2 * i - 1], deadlines[2 * i] = deadline, id
  end
  call_many('ZADD', LEASED, deadlines)
  audit(ids, 'leased', 's', step, 'o', owner)
  return tokens, moved
end

-- Which of the ids this owner still holds, how many it has consumed, and what was renumbered.
local function held_by(owner, ids)
  local held, num_consumed, moved = {}, 0, {}
  for _, id in ipairs(ids) do
    local group = redis.call('HMGET', group_key(id), 'state', 'owner', 'moved', 'versions')
    if group[2] == owner then
      if group[1] == 'consumed' then num_consumed = num_consumed + 1 end
      if group[1] == 'leased' then
        held[#held + 1] = id
        if group[3] then
          moved[#moved + 1] = id
          moved[#moved + 1] = group[4]
        end
      end
    end
  end
  return held, num_consumed, moved
end

-- The tokens older than this are masked by the trainer; '' in the modes that mask none.
local function mask_below(version)
  return on_stale == 'mask_tokens' and whole(oldest_fresh(version)) or ''
end

local function write_batch(step, owner, version, num_groups, num_shares, ids, tokens, oldest)
  redis.call('HSET', lease_key(step), 'owner', owner, 'version', version, 'groups', num_groups,
    'shares', num_shares, 'ids', ids, 'tokens', tokens, 'oldest', oldest)
  redis.call('ZADD', BATCHES, step, step)
end

local function forget_batch(step)
  redis.call('UNLINK', lease_key(step))
  redis.call('ZREM', BATCHES, step)
end

local function read_batch(step)
  local batch = redis.call('HMGET', lease_key(step), 'owner', 'version', 'groups', 'shares', 'ids',
    'tokens', 'oldest', 'done')
  return batch[1] and batch
end

-- Milliseconds until the next lease of this shard expires, -1 if there is none. In the middle of a
-- takeover none does: who waits is woken by its end.
local function until_expiry()
  if is_reconciling then return -1 end
  local first = redis.call('ZRANGE', LEASED, '0', '0', 'WITHSCORES')
  return first[2] and math.max(1, first[2] - now_ms() + 1) or -1
end
