-- Records the prompt of a running group and its worker's position in its tasks, so that no prompt is
-- lost if the worker dies. A repeated call replaces the prompt.
-- ARGV: group id, prompt ('attempt index task'), worker, position.
-- Reply: 1 | 0 if the group is not running (nothing is recorded).
-- @include lib/audit
-- @include lib/kept
-- @include lib/prompts
-- @include lib/running
if not redis.call('ZSCORE', RUNNING, ARGV[1]) then return 0 end
local tasks, prompt = key('tasks'), read_prompt(ARGV[2])
local before = redis.call('HGET', PROMPTS, ARGV[1])
if before and name_of(before) ~= name_of(ARGV[2]) then forget_kept({before}) end -- it was refused
redis.call('HSET', PROMPTS, ARGV[1], ARGV[2])
if finite(redis.call('HGET', tasks, ARGV[3]), -1) < finite(ARGV[4], -1) then
  redis.call('HSET', tasks, ARGV[3], ARGV[4])
end
audit({ARGV[1]}, 'begun', 'p', prompt.task .. ':' .. prompt.index)
return 1
