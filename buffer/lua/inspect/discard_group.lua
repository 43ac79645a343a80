-- Drops a quarantined group.   Request: group_id.   Reply: 1 if it was in quarantine, else 0.
local id = request.group_id
if redis.call('ZREM', QUARANTINED, id) == 0 then return 0 end
count('bytes_quarantined', -finite(fields_of(id, 'bytes')[1], 0))
drop({id}, 'discarded')
return 1
