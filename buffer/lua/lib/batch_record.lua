-- The record of a step's batch.

local BATCHES = PREFIX .. 'batches'
local function lease_key(step) return PREFIX .. 'lease:' .. step end

local function forget_batch(step)
  redis.call('UNLINK', lease_key(step))
  redis.call('ZREM', BATCHES, step)
end

local function write_batch(step, lease_token, version, num_groups, num_shares, ids, costs, masked_below)
  redis.call('HSET', lease_key(step), 'owner', lease_token, 'version', version, 'groups', num_groups,
    'shares', num_shares, 'ids', ids, 'costs', costs, 'oldest', masked_below)
  redis.call('ZADD', BATCHES, step, step)
end

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do
    found[#found + 1] = word
    if #found == MAX_BATCH then break end
  end
  return found
end

-- The record of a step's batch; nil if there is none or it is damaged. Groups of a damaged one return
-- when their lease expires, and a new batch is formed.
local function read_batch(step)
  local batch = redis.call('HMGET', lease_key(step), 'owner', 'version', 'groups', 'shares', 'ids',
    'costs', 'oldest', 'done')
  if not batch[1] then return nil end
  local ids, costs = words(batch[5] or ''), words(batch[6] or '')
  local is_whole = #ids == #costs and finite(batch[2]) and finite(batch[3]) and finite(batch[4])
    and (batch[7] == '' or finite(batch[7]))
  for _, number in ipairs(costs) do is_whole = is_whole and finite(number) end
  if not is_whole then
    if batch[8] then damaged('lease:' .. step) end -- it was trained and must not be trained again
    forget_batch(step)
    return nil
  end
  return batch, ids, costs
end
