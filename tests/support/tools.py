"""Two tool calls as an engine's stream says them, in pieces, and as a client has to read them."""

TWO_CALLS = [("get_weather", ['{"ci', 'ty": "Pa', 'ris"}']), ("get_time", ['{"city"', ': "Rome"}'])]
WANTED = [("get_weather", {"city": "Paris"}), ("get_time", {"city": "Rome"})]
