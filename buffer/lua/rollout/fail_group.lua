-- Ends a running group that could not be completed: its prompt runs again, or is quarantined if it
-- failed too often.
-- ARGV: group id, prompt ('attempt index task'), failures after which a prompt is quarantined.
-- Reply: {failures of the prompt so far, 1 if it is quarantined} | nil if the group was not running.
-- @include lib/audit
-- @include lib/poison
-- @include lib/prompts
-- @include lib/running
local prompt = read_prompt(ARGV[2])
if leave_running({ARGV[1]}) == 0 then return nil end
local field = prompt.index .. ' ' .. prompt.task
local times = finite(redis.call('HGET', FAILURES, field), 0) + 1
redis.call('HSET', FAILURES, field, whole(times))
count('abandoned:failed', 1)
audit({ARGV[1]}, 'abandoned', 'r', 'failed')
wake('room')
if times >= finite(ARGV[3], 1) then
  redis.call('HDEL', FAILURES, field)
  quarantine_prompt(ARGV[1], prompt, 'failed', times)
  return {times, 1}
end
rerun(ARGV[1], ARGV[2])
return {times, 0}
