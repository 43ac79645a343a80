-- Gives a new group a credit to be generated, if there is room.
-- ARGV: group id.   Reply: {'admitted', trainer version} | {'wait', last wake id, in use, limit}
local id = ARGV[1]

local admitted_at = redis.call('ZSCORE', RUNNING, id)
if admitted_at then return {'admitted', tonumber(admitted_at)} end

local trainer = setting('trainer_version')
local lag = 0
for _, version in ipairs(redis.call('HVALS', ENGINES)) do lag = math.max(lag, trainer - version) end

-- Counted from the sets themselves: a cumulative counter would drift at the first dropped group.
local in_use = redis.call('ZCARD', RUNNING) + redis.call('ZCARD', READY) + redis.call('ZCARD', LEASED)
local limit = math.max(0, (setting('max_staleness') + 1 - lag) * setting('groups_per_step'))
if in_use >= limit then return {'wait', last_wake('room'), in_use, limit} end

redis.call('ZADD', RUNNING, trainer, id)
return {'admitted', trainer}
