-- Restores what a dump knows of a shard besides its groups, so that a lost server can be filled again.
-- Request: rollbacks, num_rollbacks, failures, quarantined_prompts (both by prompt, as they are stored).
-- Reply: 1
redis.call('HSET', SETTINGS, 'rollbacks', request.rollbacks, 'num_rollbacks', request.num_rollbacks)
for prompt, times in pairs(request.failures) do redis.call('HSET', FAILURES, prompt, times) end
for prompt, why in pairs(request.quarantined_prompts) do
  redis.call('HSET', QUARANTINED_PROMPTS, prompt, why)
end
return 1
