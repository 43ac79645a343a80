-- quarantined -> ready, as if it had never been leased.
-- ARGV: group id.   Reply: 1 if it left the quarantine, else 0.
local id = ARGV[1]
if redis.call('ZREM', QUARANTINED, id) == 0 then return 0 end
count('bytes_quarantined', -redis.call('HGET', group_key(id), 'bytes'))
local gaps, num_gaps = read_gaps()
if update_numbers(id, gaps, num_gaps) == 'gone' then
  drop({id}, 'lineage')
  return 1
end
redis.call('HDEL', group_key(id), 'leases', 'why')
to_ready(id, 'requeued', 'r', 'released')
wake('room') -- with on_full=drop_stalest it may be thrown out again
return 1
