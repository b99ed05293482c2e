import sys

import dspy


class UseTools(dspy.Signature):
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


class LM(dspy.LM):
    supports_function_calling = True  # LiteLLM's table, which dspy asks, does not have this model


def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees"


dspy.configure(lm=LM("openai/scripted", api_base=f"{sys.argv[1]}/v1", api_key="unused", cache=False, num_retries=0))
print("plain chat:", dspy.settings.lm("Hello")[0])
print("chat:", dspy.Predict("question -> answer")(question="Predict a greeting").answer)
with dspy.context(adapter=dspy.JSONAdapter()):
    answer = dspy.Predict("question -> city, degrees: int")(question="Describe Rome")
    print("object:", f'{{"city": "{answer.city}", "degrees": {answer.degrees}}}')
with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
    (call,) = dspy.Predict(UseTools)(question="Weather in Rome?", tools=[dspy.Tool(weather)]).calls.tool_calls
    print("call:", call.name, call.args["city"])
