-- leased -> quarantined, for a group that its rank cannot use.
-- ARGV: lease token, reason, group id.   Reply: 1 if it is in quarantine now, else 0.
-- @include lib/group
-- @include lib/quarantined
local group = fields_of(ARGV[3], 'state', 'bytes')
if group[1] == 'quarantined' then return 1 end
if not is_held(ARGV[3], ARGV[1]) then return 0 end
redis.call('ZREM', LEASED, ARGV[3])
to_quarantine(ARGV[3], ARGV[2], group[2])
return 1
