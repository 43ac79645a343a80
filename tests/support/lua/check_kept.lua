-- Names of prompts with kept tokens that neither run nor wait to run again.
-- Reply: {'index task', ...}
local wanted, lost = {}, {}
for _, texts in ipairs({redis.call('HVALS', PROMPTS), redis.call('LRANGE', RETRIES, '0', '-1')}) do
  for _, text in ipairs(texts) do wanted[name_of(text) or ''] = true end
end
for _, name in ipairs(redis.call('HKEYS', KEPT)) do
  if not wanted[name] then lost[#lost + 1] = name end
end
return lost
