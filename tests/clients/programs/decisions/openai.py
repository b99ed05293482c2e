import json
import sys

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
image = json.loads(sys.argv[2])
route: dict = {
    "type": "choice",
    "name": "route",
    "instructions": "Where to?",
    "choices": [{"value": "sales", "description": "new orders"}, {"value": True}, {"value": "true"}],
}
questions: list = [
    {"type": "predicate", "instructions": "Is the tool call safe?"},
    route,
    {
        "type": "score",
        "name": "quality",
        "instructions": [{"type": "input_text", "text": "How good?"}, {"type": "input_json", "data": {"scale": 5}}],
        "levels": [{"label": "bad"}, {"label": "fine", "description": "no complaint"}, {"label": "good"}],
    },
]
conversation = [
    {"role": "system", "content": "Be fair."},
    {"role": "user", "content": [{"type": "input_text", "text": "Pay 3."}, {"type": "input_json", "data": {"sum": 3}}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "I pay."}], "phase": "final_answer"},
    {"type": "function_call", "call_id": "a", "name": "pay", "arguments": '{"sum": 3}'},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "paid"}]},
    {"type": "custom_tool_call", "call_id": "b", "name": "note", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "noted"},
]
seen = [{"role": "user", "content": [{"type": "input_image", "image_url": image, "detail": "auto"}]}]
for label, given in (("text", "Refund me!"), ("conversation", conversation), ("image", seen)):
    cache = {"prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}
    decision = client.decisions.create(
        model="demo-vision", input=given, questions=questions, safety_identifier="s", **cache
    )
    predicate, choice, score = decision.answers
    print(f"{label} types:", [answer.type for answer in decision.answers])
    print(f"{label} names:", [answer.name for answer in decision.answers])
    print(f"{label} classes:", [type(answer).__name__ for answer in decision.answers])
    print(f"{label} predicate:", 0 <= predicate.probability <= 1)
    print(f"{label} values:", [each.value for each in choice.probabilities])
    print(f"{label} labels:", [[each.value, each.label] for each in score.probabilities])
    sums = [sum(each.probability for each in answer.probabilities) for answer in (choice, score)]
    print(f"{label} sums:", [round(each, 6) for each in sums])
    print(f"{label} usage:", decision.usage.input_tokens > 0, decision.usage.output_tokens_details.reasoning_tokens)
for bad in (
    {"questions": []},
    {"questions": questions[:1] * 401},
    {"questions": [{"type": "guess", "instructions": "x"}]},
    {"questions": [route | {"choices": [{"value": "a"}]}]},
    {"questions": [questions[2] | {"levels": []}]},
    {"input": [{"type": "function_call_output", "call_id": "z", "output": "x"}], "questions": questions},
):
    try:
        client.decisions.create(**{"model": "demo-vision", "input": "x"} | bad)
    except BadRequestError as error:
        print("refused:", error.param)
