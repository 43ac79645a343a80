-- Frees the credit of a running group that will never be pushed.
-- Request: group_id, reason, rerun ('never' | 'as_stale', by the rules for stale groups | 'always',
--          unchanged), prompt ('attempt index task'; none takes that of begin_group).
-- Reply: 1 if the group was running, else 0.
-- If its prompt runs again, a late push of the group is a duplicate. If it was stopped, what is kept of
-- its tokens stays.
local id, reason, rule = request.group_id, request.reason, request.rerun
local prompt = request.prompt or redis.call('HGET', PROMPTS, id)
if leave_running({id}, reason == 'stopped' and rule == 'always') == 0 then return 0 end
count('abandoned:' .. reason, 1)
wake('room')
audit({id}, 'abandoned', 'r', reason)
if rule ~= 'never' and prompt then
  leave_tombstones({id}, 'abandoned')
  if rule == 'as_stale' then requeue_stale(read_prompt(prompt))
  else rerun(id, prompt) end
end
return 1
