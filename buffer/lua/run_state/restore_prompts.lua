-- Queues prompts to be run and sets workers' positions in a buffer that has lost both.
-- Request: positions ({worker, position} of each), prompts.
-- Reply: 1 | 0 if the buffer has prompts or positions (nothing is changed).
local tasks = key('tasks')
if redis.call('EXISTS', tasks, RETRIES) > 0 then return 0 end
for _, one in ipairs(request.positions) do redis.call('HSET', tasks, one[1], one[2]) end
for _, prompt in ipairs(request.prompts) do redis.call('RPUSH', RETRIES, prompt) end
return 1
