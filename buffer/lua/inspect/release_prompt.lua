-- Takes a prompt out of quarantine: it runs again with a clean record, or is forgotten.
-- Request: task, index, runs_again.   Reply: 1 if it was in quarantine, else 0.
local field = request.index .. ' ' .. request.task
redis.call('HDEL', FAILURES, field) -- also if another shard quarantined it
if redis.call('HDEL', QUARANTINED_PROMPTS, field) == 0 then return 0 end
if request.runs_again then
  redis.call('RPUSH', RETRIES,
    write_prompt({attempt = 0, reruns = 0, index = request.index, task = request.task}))
end
count(request.runs_again and 'prompts_released' or 'prompts_discarded', 1)
return 1
