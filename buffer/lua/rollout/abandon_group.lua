-- Gives the credit of a running group back that will never be pushed.
-- ARGV: group id, reason, the prompt to run again ('attempt index task'; '' for none), 1 if that is for
--       its age, and so by the rules for stale groups; else it runs again as it is.
-- Reply: 1 if the group was running, else 0.
-- A group whose prompt runs again is over: a push of it that is still on its way is a duplicate.
-- @include lib/audit
-- @include lib/prompts
-- @include lib/running
-- @include lib/tombstones
if leave_running({ARGV[1]}) == 0 then return 0 end
count('abandoned:' .. ARGV[2], 1)
wake('room')
audit({ARGV[1]}, 'abandoned', 'r', ARGV[2])
if ARGV[3] ~= '' then
  leave_tombstones({ARGV[1]}, 'abandoned')
  if ARGV[4] == '1' then requeue(read_prompt(ARGV[3]), true)
  else rerun(ARGV[1], ARGV[3]) end
end
return 1
