-- Acks groups that the restored checkpoint contains, in whatever state they are.
-- Request: lineage, group_ids.   Reply: 1 | 0 if another lineage took over.
if request.lineage ~= lineage then return 0 end
local total = 0
for _, id in ipairs(request.group_ids) do
  local state = fields_of(id, 'state')[1]
  if not state then
    -- The server lost it, and holds it for running: neither may it be pushed again nor its prompt run
    -- again when its worker is reclaimed. It must not be trained twice.
    leave_running({id})
    leave_tombstones({id}, 'acked')
  elseif not is_tombstone(state) then
    if state == 'ready' then leave_ready({id})
    elseif state == 'leased' or state == 'consumed' or state == 'quarantined' then
      redis.call('ZREM', key(state), id)
    end
    local num_bytes = to_tombstones({id}, 'acked')
    if state == 'consumed' or state == 'quarantined' then count('bytes_' .. state, -num_bytes) end
    count('acked', 1)
    audit({id}, 'acked', 'r', 'reconciled')
    total = total + 1
  end
end
if total > 0 then
  local before = finite(redis.call('HGET', key('reconcile'), 'acked'), 0)
  redis.call('HSET', key('reconcile'), 'acked', whole(before + total))
  wake('room')
end
return 1
