-- Records the prompt of a running group and its worker's position in its tasks, so that no prompt is
-- lost if the worker dies. A repeated call replaces the prompt.
-- Request: group_id, prompt ('attempt index task'), worker, position.
-- Reply: 1 | 0 if the group is not running (nothing is recorded).
local id, text, worker = request.group_id, request.prompt, request.worker
if not redis.call('ZSCORE', RUNNING, id) then return 0 end
local tasks, prompt = key('tasks'), read_prompt(text)
local before = redis.call('HGET', PROMPTS, id)
if before and name_of(before) ~= name_of(text) then forget_kept({before}) end -- it was refused
redis.call('HSET', PROMPTS, id, text)
if finite(redis.call('HGET', tasks, worker), -1) < request.position then
  redis.call('HSET', tasks, worker, request.position)
end
audit({id}, 'begun', 'p', prompt.task .. ':' .. prompt.index)
return 1
