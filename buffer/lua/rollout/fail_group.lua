-- Ends a running group that could not be completed: its prompt runs again, or is quarantined if it
-- failed too often.
-- Request: group_id, prompt ('attempt index task'), max_failures (then the prompt is quarantined).
-- Reply: Failure: failures of the prompt so far, 1 if it is quarantined | nil if the group was not running.
local id, prompt = request.group_id, read_prompt(request.prompt)
if leave_running({id}) == 0 then return nil end
local field = prompt.index .. ' ' .. prompt.task
local times = finite(redis.call('HGET', FAILURES, field), 0) + 1
redis.call('HSET', FAILURES, field, whole(times))
count('abandoned:failed', 1)
audit({id}, 'abandoned', 'r', 'failed')
wake('room')
if times >= request.max_failures then
  redis.call('HDEL', FAILURES, field)
  quarantine_prompt(id, prompt, 'failed', times)
  return {times, 1}
end
rerun(id, request.prompt)
return {times, 0}
