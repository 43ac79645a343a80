-- Records the prompt of a running group and its worker's position in its tasks, so that no prompt is
-- lost if the worker dies. A repeated call replaces the prompt.
-- Request: group_id, prompt ('attempt index task'), worker, position.
-- Reply: 1 | 0 if the group is not running (nothing is recorded).
local id, text = request.group_id, request.prompt
if not redis.call('ZSCORE', RUNNING, id) then return 0 end
local before = redis.call('HGET', PROMPTS, id)
if before and name_of(before) ~= name_of(text) then forget_kept({before}) end -- it was refused
note_prompt(id, text, request.worker, request.position)
return 1
