-- The library: choosing the groups of a batch, taking them, and the record of a step's batch.

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do
    found[#found + 1] = word
    if #found == MAX_BATCH then break end
  end
  return found
end

-- Whether an id can be one that was pushed: UTF-8 without white space and colons. (Near enough: the
-- patterns let some code points pass that do not exist.)
local function is_id(id)
  if string.find(id, '[%s%c:]') then return false end
  if not string.find(id, '[\128-\255]') then return true end
  local rest = string.gsub(id, '[\194-\223][\128-\191]', '')
  rest = string.gsub(rest, '[\224-\239][\128-\191][\128-\191]', '')
  rest = string.gsub(rest, '[\240-\244][\128-\191][\128-\191][\128-\191]', '')
  return not string.find(rest, '[\128-\255]')
end

-- on_stale=wait: the oldest running group that would be too old after a step at `version`.
local function blocking_group(version)
  if on_stale ~= 'wait' then return '', 0 end
  local oldest = redis.call('ZRANGE', RUNNING, '-inf', whole(oldest_fresh(version)), 'BYSCORE',
    'LIMIT', '0', '1', 'WITHSCORES')
  return oldest[1] or '', finite(oldest[2], 0)
end

-- At most `limit` ready groups as the selector orders them, as id, key, id, key... (smaller first).
-- With on_stale=wait those that this is the last chance of come first, whatever the selector.
-- What has a name that no push could give it is dropped, and the second result tells whether any was.
local function choose(version, limit)
  limit = math.min(finite(limit, 0), MAX_BATCH)
  local chosen, seen, was_damaged = {}, {}, false
  local function add(found, offset, sign)
    for i = 1, #found, 2 do
      if not is_id(found[i]) then
        was_damaged = true
        leave_ready({found[i]})
        drop({found[i]}, 'damaged')
      elseif not seen[found[i]] and #chosen < 2 * limit then
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
  if selector == 'fifo' then add(redis.call('ZRANGE', ARRIVALS, '0', last, 'WITHSCORES'), 0, 1) end
  if selector == 'freshest' then
    add(redis.call('ZRANGE', READY, '0', last, 'REV', 'WITHSCORES'), 0, -1)
  elseif #chosen < 2 * limit then -- of fifo what `arrivals` lacks
    add(redis.call('ZRANGE', READY, '0', last, 'WITHSCORES'), 0, 1)
  end
  return chosen, was_damaged
end

-- What `take` needs of groups that are in `ready`; those of whose hash it cannot be had leave it here.
-- Returns the ids that are whole, and their fields by id.
local function whole_groups(ids)
  local found, fields = {}, {}
  for _, id in ipairs(ids) do
    local group = fields_of(id, 'tokens', 'leases', 'moved', 'versions', 'state', 'min_version', 'bytes',
      'trainable', 'seq')
    if group[5] == 'ready' and finite(group[1]) and finite(group[6]) and finite(group[7])
        and finite(group[8]) and finite(group[9]) then
      found[#found + 1], fields[id] = id, group
    else
      leave_ready({id})
      -- One that another set holds just had no place in `ready`.
      local set = group[5] and sets_of_groups[group[5]]
      if not (set and redis.call('ZSCORE', set, id)) then set_aside(id) end
    end
  end
  return found, fields
end

-- ready -> leased, of whole groups. Returns the tokens of each, and {id, versions...} of those that
-- were renumbered.
local function take(ids, fields, owner, deadline, step)
  local tokens, moved, deadlines = {}, {}, {}
  leave_ready(ids)
  for i, id in ipairs(ids) do
    local group = fields[id]
    redis.call('HSET', group_key(id), 'state', 'leased', 'owner', owner, 'leases', finite(group[2], 0) + 1)
    tokens[i] = whole(finite(group[1]))
    if group[3] then
      moved[#moved + 1] = id
      moved[#moved + 1] = group[4] or ''
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
    local group = fields_of(id, 'state', 'owner', 'moved', 'versions')
    if group[2] == owner then
      if group[1] == 'consumed' then num_consumed = num_consumed + 1 end
      if group[1] == 'leased' then
        held[#held + 1] = id
        if group[3] then
          moved[#moved + 1] = id
          moved[#moved + 1] = group[4] or ''
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

-- The record of a step's batch; none if there is none that can be read. Then what it had leased comes
-- back by itself, and a new one is formed.
local function read_batch(step)
  local batch = redis.call('HMGET', lease_key(step), 'owner', 'version', 'groups', 'shares', 'ids',
    'tokens', 'oldest', 'done')
  if not batch[1] then return nil end
  local ids, tokens = words(batch[5] or ''), words(batch[6] or '')
  local is_whole = #ids == #tokens and finite(batch[2]) and finite(batch[3]) and finite(batch[4])
    and (batch[7] == '' or finite(batch[7]))
  for _, number in ipairs(tokens) do is_whole = is_whole and finite(number) end
  if not is_whole then
    if batch[8] then damaged('lease:' .. step) end -- it was trained: never again
    forget_batch(step)
    return nil
  end
  return batch, ids, tokens
end

-- Until when a lease lasts, for whoever asks again.
local function deadline_of(id) return whole(finite(redis.call('ZSCORE', LEASED, id), now_ms())) end

-- Milliseconds until the next lease of this shard expires, -1 if there is none. In the middle of a
-- takeover none does: who waits is woken by its end.
local function until_expiry()
  if is_reconciling then return -1 end
  local first = redis.call('ZRANGE', LEASED, '0', '0', 'WITHSCORES')
  local deadline = finite(first[2])
  return deadline and math.max(1, deadline - now_ms() + 1) or -1
end
