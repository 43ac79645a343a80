-- Ends the groups that a restarted worker ran before; their prompts run again.
-- Request: worker, caller (the only one that admits groups for it from now on), cursor, bound (about how many to scan),
--          credit_ms, counts_as_death (whether the worker's death counts against the prompts).
-- Reply: Reclaimed: next cursor ('0': done), number of groups ended
local calls, caller = key('calls'), request.caller
if not redis.call('HGET', calls, caller) then
  redis.call('HSET', calls, caller, cmsgpack.pack({0, {}}), request.worker, caller)
elseif redis.call('HGET', calls, request.worker) ~= caller then
  return {'0', 0} -- a copy that comes after another caller became the worker: the groups are that one's
end
local reply = redis.call('ZSCAN', RUNNING, request.cursor, 'MATCH', request.worker .. '-*',
  'COUNT', bound_of(request.bound))
local ids, seen, lost_before = {}, {}, lost_with_server(request.credit_ms)
if not request.counts_as_death then lost_before = LARGEST end
for i = 1, #reply[2], 2 do
  local id = reply[2][i]
  if not seen[id] then ids[#ids + 1] = id end
  seen[id] = true
end
for first = 1, #ids, MAX_ITEMS do
  lose_running({unpack(ids, first, math.min(first + MAX_ITEMS - 1, #ids))}, 'worker_died', lost_before)
end
return {reply[1], #ids}
