-- The prompts that were begun and are not trained by a step, and each worker's position in its tasks.
-- Request: step.
-- Reply: TaskPrompts: {worker, position, ...}, {'attempt index task', ...}
local prompts = {}
local function add(texts)
  for _, text in ipairs(texts) do
    if read_prompt(text) then prompts[#prompts + 1] = text end
  end
end
local function add_groups(ids)
  for _, id in ipairs(ids) do
    local group = fields_of(id, 'task', 'index', 'attempt')
    if group[1] and group[2] then
      local attempt = finite(group[3], 0)
      add({write_prompt({attempt = attempt, reruns = 0, index = group[2], task = group[1]})})
    end
  end
end
add(redis.call('HVALS', PROMPTS))
add(redis.call('LRANGE', RETRIES, '0', '-1'))
add_groups(redis.call('ZRANGE', READY, '0', '-1'))
add_groups(redis.call('ZRANGE', LEASED, '0', '-1'))
add_groups(redis.call('ZRANGE', key('consumed'), '(' .. request.step, '+inf', 'BYSCORE'))
return {redis.call('HGETALL', key('tasks')), prompts}
