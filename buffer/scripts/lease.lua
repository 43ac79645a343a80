-- Gives the global batch of one step: the first rank to come forms it, the others get the same one.
-- ARGV: step, version, number of groups, number of shares, timeout in ms, owner token, bound of work.
-- Reply: {'leased', owner, deadline ms, {ids}, {tokens}, {ids still held}}
--      | {'wait', last wake id, ready, ms until the next lease expires or -1}
--      | {'again'} (more to drop than one call may) | {'done'} (step already trained)
--      | {'conflict', version, groups, shares} (the step was leased with other arguments)
local step, version, num_groups, num_shares = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local timeout_ms, owner, limit = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])

if expire_leases(limit) == limit then return {'again'} end

-- The batch as it was formed. Shares are cut from all of it by a pure function at each rank, so that
-- every rank cuts alike even if some groups were dropped before the last rank came.
local record = redis.call('HMGET', lease_key(step), 'owner', 'version', 'groups', 'shares', 'ids', 'tokens')
if record[1] then
  local ids, held, is_done = {}, {}, false
  for id in string.gmatch(record[5], '%S+') do
    local group = redis.call('HMGET', group_key(id), 'state', 'owner')
    if group[2] == record[1] then
      if group[1] == 'leased' then held[#held + 1] = id else is_done = true end
    end
    ids[#ids + 1] = id
  end
  if is_done or redis.call('HEXISTS', lease_key(step), 'done') == 1 then return {'done'} end
  if #held > 0 then
    if record[2] ~= ARGV[2] or record[3] ~= ARGV[3] or record[4] ~= num_shares then
      return {'conflict', record[2], record[3], record[4]}
    end
    local tokens = {}
    for number in string.gmatch(record[6], '%S+') do tokens[#tokens + 1] = number end
    return {'leased', record[1], redis.call('ZSCORE', LEASED, held[1]), ids, tokens, held}
  end
  redis.call('DEL', lease_key(step)) -- all of it was dropped or went back: form a new one
end
if tonumber(step) <= setting('acked_step') then return {'done'} end

if drop_stale_ready(version, limit) == limit then return {'again'} end
if redis.call('ZCARD', READY) < num_groups then
  redis.call('HSET', SETTINGS, 'wanted', num_groups)
  local first = redis.call('ZRANGE', LEASED, 0, 0, 'WITHSCORES')
  local wait_ms = first[2] and math.max(1, first[2] - now_ms() + 1) or -1
  return {'wait', last_wake('batch'), redis.call('ZCARD', READY), wait_ms}
end
redis.call('HSET', SETTINGS, 'wanted', 0)

local selector = redis.call('HGET', SETTINGS, 'selector')
local ids
if selector == 'fifo' then ids = redis.call('ZRANGE', ARRIVALS, 0, num_groups - 1)
elseif selector == 'freshest' then ids = redis.call('ZRANGE', READY, 0, num_groups - 1, 'REV')
else ids = redis.call('ZRANGE', READY, 0, num_groups - 1) end

local deadline, tokens = whole(now_ms() + timeout_ms), {}
for _, id in ipairs(ids) do
  leave_ready(id)
  redis.call('ZADD', LEASED, deadline, id)
  redis.call('HSET', group_key(id), 'state', 'leased', 'owner', owner)
  tokens[#tokens + 1] = redis.call('HGET', group_key(id), 'tokens')
end
redis.call('HSET', lease_key(step), 'owner', owner, 'version', ARGV[2], 'groups', ARGV[3],
  'shares', num_shares, 'ids', table.concat(ids, ' '), 'tokens', table.concat(tokens, ' '))
return {'leased', owner, deadline, ids, tokens, ids}
