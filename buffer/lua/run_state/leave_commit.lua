-- Frees an engine's commit place for another engine.
-- Request: engine.   Reply: 1 if it held a place, 0 if not.
local was_inside = redis.call('ZREM', key('commit_gate'), request.engine)
if was_inside == 1 then wake('gate') end
return was_inside
