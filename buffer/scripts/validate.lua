-- The last gate before the step: which groups of a lease may still be trained. Renews their deadline.
-- ARGV: version, owner token, timeout in ms, group ids...   Reply: the ids that stay.
local version, owner = tonumber(ARGV[1]), ARGV[2]
local deadline, oldest = whole(now_ms() + tonumber(ARGV[3])), oldest_fresh(version)
local fresh, num_dropped = {}, 0

for i = 4, #ARGV do
  local id = ARGV[i]
  if is_held(id, owner) then
    if tonumber(redis.call('HGET', group_key(id), 'min_version')) >= oldest then
      redis.call('ZADD', LEASED, deadline, id)
      fresh[#fresh + 1] = id
    else
      redis.call('ZREM', LEASED, id)
      drop_stale(id)
      num_dropped = num_dropped + 1
    end
  end
end
if num_dropped > 0 then wake('room') end
return fresh
