-- The restored checkpoint contains these groups: they are acknowledged, wherever they are by now.
-- ARGV: lineage, group ids...   Reply: 1 | 0 if another lineage took over.
if ARGV[1] ~= lineage then return 0 end
local total = 0
for i = 2, #ARGV do
  local id = ARGV[i]
  local state = redis.call('HGET', group_key(id), 'state')
  if not state then
    -- The server lost it, and its producer may push it again: it must not be trained twice.
    leave_tombstones({id}, 'acked')
  elseif not is_buried(state) then
    if state == 'ready' then leave_ready({id}) else redis.call('ZREM', key(state), id) end
    local num_bytes = bury({id}, 'acked')
    if state == 'consumed' or state == 'quarantined' then count('bytes_' .. state, -num_bytes) end
    count('acked', 1)
    audit({id}, 'acked', 'r', 'reconciled')
    total = total + 1
  end
end
if total > 0 then
  redis.call('HINCRBY', key('reconcile'), 'acked', total)
  wake('room')
end
return 1
