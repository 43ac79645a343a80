-- Queues prompts to be run and sets workers' positions in a buffer that has lost both.
-- ARGV: number of workers; then for each worker its name and position; then the prompts.
-- Reply: 1 | 0 if the buffer has prompts or positions (nothing is changed).
-- @include lib/prompts
local tasks, last = key('tasks'), 1 + 2 * tonumber(ARGV[1])
if redis.call('EXISTS', tasks, RETRIES) > 0 then return 0 end
for i = 2, last, 2 do redis.call('HSET', tasks, ARGV[i], ARGV[i + 1]) end
for i = last + 1, #ARGV do redis.call('RPUSH', RETRIES, ARGV[i]) end
return 1
