-- Drops a quarantined group.   ARGV: group id.   Reply: 1 if it was in quarantine, else 0.
-- @include lib/drop
-- @include lib/group
-- @include lib/quarantined
if redis.call('ZREM', QUARANTINED, ARGV[1]) == 0 then return 0 end
count('bytes_quarantined', -finite(fields_of(ARGV[1], 'bytes')[1], 0))
drop({ARGV[1]}, 'discarded')
return 1
