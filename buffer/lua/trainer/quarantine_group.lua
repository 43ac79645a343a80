-- leased -> quarantined, for a group that its rank cannot use.
-- Request: lease_token, reason, group_id.   Reply: 1 if it is in quarantine now, else 0.
local id = request.group_id
local group = fields_of(id, 'state', 'bytes')
if group[1] == 'quarantined' then return 1 end
if not is_held(id, request.lease_token) then return 0 end
redis.call('ZREM', LEASED, id)
to_quarantine(id, request.reason, group[2])
return 1
