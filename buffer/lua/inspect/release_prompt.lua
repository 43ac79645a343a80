-- Takes a prompt out of quarantine: it runs again with a clean record, or is forgotten.
-- ARGV: task, index, 1 to run it again.   Reply: 1 if it was in quarantine, else 0.
-- @include lib/poison
-- @include lib/prompts
local field = ARGV[2] .. ' ' .. ARGV[1]
redis.call('HDEL', FAILURES, field) -- also if another shard quarantined it
if redis.call('HDEL', POISONOUS, field) == 0 then return 0 end
if ARGV[3] == '1' then
  redis.call('RPUSH', RETRIES, write_prompt({attempt = 0, reruns = 0, index = ARGV[2], task = ARGV[1]}))
end
count(ARGV[3] == '1' and 'prompts_released' or 'prompts_discarded', 1)
return 1
