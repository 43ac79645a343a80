-- Gives a new group a credit to be generated, if there is room.
-- ARGV: group id, ms that the credit lasts unless it is renewed.
-- Reply: {'admitted', trainer version} | {'wait', last wake id, in use, limit}
local id, credit_ms = ARGV[1], tonumber(ARGV[2])

if redis.call('ZSCORE', RUNNING, id) then
  redis.call('ZADD', CREDITS, whole(now_ms() + credit_ms), id)
  return {'admitted', trainer_version}
end

local lag = 0
for _, version in ipairs(redis.call('HVALS', ENGINES)) do lag = math.max(lag, trainer_version - version) end

-- Counted from the sets themselves: a cumulative counter would drift at the first dropped group.
local in_use = redis.call('ZCARD', RUNNING) + redis.call('ZCARD', READY) + redis.call('ZCARD', LEASED)
local limit = math.max(0, (max_staleness + 1 - lag) * setting('groups_per_step'))
local shard, num_shards = setting('shard'), setting('num_shards')
local quota = math.floor(limit / num_shards) + (shard < limit % num_shards and 1 or 0)
if in_use >= quota then return {'wait', last_wake('room'), in_use, quota} end

-- Scored by the oldest version that one of its tokens can have.
redis.call('ZADD', RUNNING, trainer_version - lag, id)
redis.call('ZADD', CREDITS, whole(now_ms() + credit_ms), id)
audit({id}, 'admitted', 'v', trainer_version)
return {'admitted', trainer_version}
