-- Frees the credit of a running group that will never be pushed.
-- ARGV: group id, reason, whether its prompt runs again ('never' | 'as_stale', by the rules for stale
--       groups | 'always', unchanged), the prompt ('attempt index task'; '' takes that of begin_group).
-- Reply: 1 if the group was running, else 0.
-- If its prompt runs again, a late push of the group is a duplicate. If it was stopped, what is kept of
-- its tokens stays.
-- @include lib/audit
-- @include lib/prompts
-- @include lib/running
-- @include lib/tombstones
local prompt = ARGV[4] ~= '' and ARGV[4] or redis.call('HGET', PROMPTS, ARGV[1])
local keeps = ARGV[2] == 'stopped' and ARGV[3] == 'always'
if leave_running({ARGV[1]}, keeps) == 0 then return 0 end
count('abandoned:' .. ARGV[2], 1)
wake('room')
audit({ARGV[1]}, 'abandoned', 'r', ARGV[2])
if ARGV[3] ~= 'never' and prompt then
  leave_tombstones({ARGV[1]}, 'abandoned')
  if ARGV[3] == 'as_stale' then requeue_stale(read_prompt(prompt))
  else rerun(ARGV[1], prompt) end
end
return 1
