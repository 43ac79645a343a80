-- Adds to a number in one of the run's hashes; repeated calls with the same token add once.
-- ARGV: token, name of the hash, field, amount.   Reply: 1 if added now, 0 if added before.
if not redis.call('SET', key('once:' .. ARGV[1]), '1', 'NX', 'EX', '300') then return 0 end
local before = redis.call('HGET', key(ARGV[2]), ARGV[3])
if before and not finite(before) then redis.call('HDEL', key(ARGV[2]), ARGV[3]) end
redis.call('HINCRBYFLOAT', key(ARGV[2]), ARGV[3], ARGV[4])
return 1
