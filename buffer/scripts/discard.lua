-- Drops a group that is in quarantine.   ARGV: group id.   Reply: 1 if it was there, else 0.
if redis.call('ZREM', QUARANTINED, ARGV[1]) == 0 then return 0 end
count('bytes_quarantined', -redis.call('HGET', group_key(ARGV[1]), 'bytes'))
drop({ARGV[1]}, 'discarded')
return 1
