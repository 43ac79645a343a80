-- Adds to numbers in one of the run's hashes, all at once; repeated calls with the same token add once.
-- ARGV: token, name of the hash, then field and amount of each.   Reply: 1 if added now, 0 if added before.
if not redis.call('SET', key('once:' .. ARGV[1]), '1', 'NX', 'EX', '300') then return 0 end
for at = 3, #ARGV, 2 do
    local before = redis.call('HGET', key(ARGV[2]), ARGV[at])
    if before and not finite(before) then redis.call('HDEL', key(ARGV[2]), ARGV[at]) end
    redis.call('HINCRBYFLOAT', key(ARGV[2]), ARGV[at], ARGV[at + 1])
end
return 1
