-- The step is done: leased -> consumed, for the groups that this owner still holds.
-- ARGV: owner token, step, version trained, group ids...
-- Reply: how many of them are consumed by this owner (the same number when it is sent again).
local owner, step, version = ARGV[1], ARGV[2], tonumber(ARGV[3])
local total, num_new = 0, 0

for i = 4, #ARGV do
  local id = ARGV[i]
  local group = redis.call('HMGET', group_key(id), 'state', 'owner', 'min_version', 'trainable')
  if group[2] == owner and group[1] == 'consumed' then
    total = total + 1
  elseif group[2] == owner and group[1] == 'leased' then
    redis.call('ZREM', LEASED, id)
    redis.call('ZADD', CONSUMED, step, id)
    redis.call('HSET', group_key(id), 'state', 'consumed')
    count('tokens_trained', group[4])
    local staleness = version - group[3]
    local largest = tonumber(redis.call('HGET', STATS, 'max_staleness_trained'))
    if not largest or staleness > largest then
      redis.call('HSET', STATS, 'max_staleness_trained', whole(staleness))
    end
    total, num_new = total + 1, num_new + 1
  end
end
if num_new > 0 then
  redis.call('HSET', lease_key(step), 'done', '1')
  wake('room')
end
return total
