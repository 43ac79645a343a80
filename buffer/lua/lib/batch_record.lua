-- The record of a step's batch.

local BATCHES = PREFIX .. 'batches'
local function lease_key(step) return PREFIX .. 'lease:' .. step end

local function forget_batch(step)
  redis.call('UNLINK', lease_key(step))
  redis.call('ZREM', BATCHES, step)
end

-- `lease`: as requested.
local function write_batch(lease, lease_token, ids, costs, mask_below_version)
  redis.call('HSET', lease_key(lease.step), 'lease_token', lease_token, 'version', lease.version,
    'groups', lease.num_groups, 'shares', lease.num_shares, 'ids', table.concat(ids, ' '),
    'costs', table.concat(costs, ' '), 'mask_below_version', mask_below_version or '')
  redis.call('ZADD', BATCHES, lease.step, lease.step)
end

local function words(text)
  local found = {}
  for word in string.gmatch(text or '', '%S+') do
    found[#found + 1] = word
    if #found == MAX_BATCH then break end
  end
  return found
end

-- The record of a step's batch; nil if there is none or it is damaged. Groups of a damaged one return
-- when their lease expires, and a new batch is formed.
local function read_batch(step)
  local fields = redis.call('HMGET', lease_key(step), 'lease_token', 'version', 'groups', 'shares', 'ids',
    'costs', 'mask_below_version', 'done')
  if not fields[1] then return nil end
  local batch = {lease_token = fields[1], version = finite(fields[2]), num_groups = finite(fields[3]),
    num_shares = finite(fields[4]), ids = words(fields[5]), costs = words(fields[6]),
    mask_below_version = finite(fields[7]), is_done = fields[8] ~= false}
  local is_whole = #batch.ids == #batch.costs and batch.version and batch.num_groups and batch.num_shares
    and (fields[7] == '' or batch.mask_below_version)
  for _, cost in ipairs(batch.costs) do is_whole = is_whole and finite(cost) end
  if is_whole then return batch end
  if batch.is_done then damaged('lease:' .. step) end -- it was trained and must not be trained again
  forget_batch(step)
  return nil
end
