-- A worker began anew: the groups that it ran before end, and their prompts run again.
-- ARGV: what the ids of its groups begin with (no pattern), cursor, about how many to look at,
--       ms that a credit lasts.
-- Reply: {next cursor ('0': all were looked at), how many ended}
-- @include lib/lose_running
-- @include lib/running
-- @include lib/server
local reply = redis.call('ZSCAN', RUNNING, ARGV[2], 'MATCH', ARGV[1] .. '*', 'COUNT', bound_of(ARGV[3]))
local ids, seen, lost_before = {}, {}, lost_with_server(ARGV[4])
for i = 1, #reply[2], 2 do
  local id = reply[2][i]
  if not seen[id] then ids[#ids + 1] = id end
  seen[id] = true
end
for first = 1, #ids, MAX_ITEMS do
  lose_running({unpack(ids, first, math.min(first + MAX_ITEMS - 1, #ids))}, 'worker_died', lost_before)
end
return {reply[1], #ids}
