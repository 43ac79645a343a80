-- Whether every record of a step's batch is listed in `batches`, and the other way round.
-- Request: steps.   Reply: the steps of which only one is true.
local wrong = {}
for _, step in ipairs(request.steps) do
  local is_listed = redis.call('ZSCORE', key('batches'), step) and true or false
  if (redis.call('EXISTS', key('lease:' .. step)) == 1) ~= is_listed then wrong[#wrong + 1] = step end
end
return wrong
