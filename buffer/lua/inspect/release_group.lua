-- quarantined -> ready, as if it had never been leased.
-- Request: group_id.   Reply: 1 if it left quarantine, 0 if it was not there, -1 if its hash is damaged.
local id = request.group_id
if redis.call('ZREM', QUARANTINED, id) == 0 then return 0 end
local num_bytes = finite(fields_of(id, 'bytes')[1], 0)
count('bytes_quarantined', -num_bytes)
local change = update_numbers(id, read_rollbacks())
if change == 'gone' then
  drop({id}, 'lineage')
  return 1
elseif change == 'damaged' then
  set_aside(id)
  return -1
end
redis.call('HDEL', group_key(id), 'leases', 'why')
if not to_ready(id, 'requeued', 'r', 'released') then return -1 end
wake('room') -- with on_full=drop_stalest it can be evicted
return 1
