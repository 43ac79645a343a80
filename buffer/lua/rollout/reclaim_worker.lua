-- Ends the groups that a restarted worker ran before; their prompts run again.
-- ARGV: prefix of the ids of its groups (not a pattern), cursor, about how many to scan,
--       ms that a credit lasts, 1 if the worker's death counts against the prompts.
-- Reply: {next cursor ('0': done), number of groups ended}
-- @include lib/lose_running
-- @include lib/running
-- @include lib/server
local reply = redis.call('ZSCAN', RUNNING, ARGV[2], 'MATCH', ARGV[1] .. '*', 'COUNT', bound_of(ARGV[3]))
local ids, seen, lost_before = {}, {}, lost_with_server(ARGV[4])
if ARGV[5] ~= '1' then lost_before = LARGEST end
for i = 1, #reply[2], 2 do
  local id = reply[2][i]
  if not seen[id] then ids[#ids + 1] = id end
  seen[id] = true
end
for first = 1, #ids, MAX_ITEMS do
  lose_running({unpack(ids, first, math.min(first + MAX_ITEMS - 1, #ids))}, 'worker_died', lost_before)
end
return {reply[1], #ids}
