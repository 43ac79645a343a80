-- Notes the prompt of a running group, and how far its worker is in its tasks, so that none is lost if
-- the worker dies. Said again it replaces the prompt.
-- ARGV: group id, prompt ('attempt index task'), worker, position.
-- Reply: 1 | 0 if the group is not running (then nothing is noted).
-- @include lib/audit
-- @include lib/prompts
-- @include lib/running
if not redis.call('ZSCORE', RUNNING, ARGV[1]) then return 0 end
local tasks, prompt = key('tasks'), read_prompt(ARGV[2])
redis.call('HSET', PROMPTS, ARGV[1], ARGV[2])
if finite(redis.call('HGET', tasks, ARGV[3]), -1) < finite(ARGV[4], -1) then
  redis.call('HSET', tasks, ARGV[3], ARGV[4])
end
audit({ARGV[1]}, 'begun', 'p', prompt.task .. ':' .. prompt.index)
return 1
