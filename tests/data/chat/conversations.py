"""Random conversations, tools and small templates. Everything follows from the random.Random that is given."""

WORDS = ["hello", "World", "  spaced  ", "line\nbreak", "\n\nlead", "trail \n", "quote'd", 'double"d', "naïve", "日本語", "😀", "<tag>", "&amp;",
         "{{ x }}", "{% if %}", "back\\slash", "tab\tbed", "</think>", "<think>", "a</think>b", "", " ", "\u00a0nbsp\u2003", "Ωμέγα", "42", "<|im_end|>"]


def text(random):
    return " ".join(random.choice(WORDS) for _ in range(random.randint(0, 5)))


def value(random, depth=0):
    kind = random.randint(0, 9 if depth < 3 else 6)
    if kind <= 1:
        return text(random)
    if kind == 2:
        return random.randint(-50, 50)
    if kind == 3:
        return random.choice([0.0, 1.0, -2.5, 1e-7, 1e22, 123456.789, 0.1, 3.0e15, 1e16])
    if kind == 4:
        return random.choice([True, False])
    if kind == 5:
        return None
    if kind == 6:
        return random.choice([10**12, -(2**63), 2**63 - 1])
    if kind == 7:
        return [value(random, depth + 1) for _ in range(random.randint(0, 3))]
    return {random.choice(["a", "b", "type", "é", "k 1", "items", "x"]): value(random, depth + 1) for _ in range(random.randint(0, 3))}


def schema(random, depth=0):
    made = {"type": random.choice(["string", "number", "object", "array"])}
    if random.random() < 0.3:
        made["enum"] = [text(random) for _ in range(random.randint(1, 3))]
    if depth < 2 and random.random() < 0.5:
        made["properties"] = {f"p{i}": schema(random, depth + 1) for i in range(random.randint(0, 3))}
    return made


def tool(random):
    function = {"name": random.choice(["get_weather", "search", "f"]), "description": text(random), "parameters": schema(random)}
    return {"type": "function", "function": function}


def message(random, role, parts):
    made = {"role": role}
    if parts and random.random() < 0.4:
        made["content"] = [{"type": "text", "text": text(random)} for _ in range(random.randint(0, 3))]
    else:
        made["content"] = text(random)
    if role == "assistant" and random.random() < 0.2:
        made["reasoning_content"] = text(random)
    if role == "assistant" and random.random() < 0.25:
        arguments = {"city": text(random), "n": value(random)}
        call = {"name": "get_weather", "arguments": arguments if random.random() < 0.7 else text(random)}
        made["tool_calls"] = [{"type": "function", "id": "call_1", "function": call} for _ in range(random.randint(1, 2))]
    return made


def conversation(random, parts=False):
    roles = []
    if random.random() < 0.5:
        roles.append("system")
    for _ in range(random.randint(0, 3)):
        roles += ["user", "assistant"]
        if random.random() < 0.2:
            roles += ["tool"] * random.randint(1, 2) + ["assistant"]
    if random.random() < 0.8:
        roles.append("user")
    if random.random() < 0.1:
        random.shuffle(roles)
    variables = {"messages": [message(random, role, parts) for role in roles], "add_generation_prompt": random.random() < 0.7}
    if random.random() < 0.9:
        variables |= {"bos_token": random.choice(["<s>", ""]), "eos_token": "</s>"}
    if random.random() < 0.3:
        variables["tools"] = [tool(random) for _ in range(random.randint(0, 2))]
    elif random.random() < 0.8:
        variables["tools"] = None
    for name in ("enable_thinking", "date_string"):
        if random.random() < 0.15:
            variables[name] = random.choice([True, False]) if name == "enable_thinking" else "1 Jan 2020"
    return variables


class Snippets:
    """Templates of all constructs, nested at random. Many fail; they must then fail for both."""

    NAMES = ["s", "t", "n", "f", "b", "l", "d", "m", "none_", "missing", "x", "y"]

    def __init__(self, random):
        self.random = random

    def variables(self):
        r = self.random
        return {"s": text(r), "t": text(r), "n": r.randint(-5, 9), "f": r.choice([0.5, -2.0, 3.25, 1e20]), "b": r.random() < 0.5, "none_": None,
                "l": [value(r) for _ in range(r.randint(0, 4))], "d": {k: value(r) for k in r.sample(["a", "b", "type", "items", "é"], r.randint(0, 4))},
                "m": [message(r, r.choice(["user", "system", "assistant"]), True) for _ in range(r.randint(0, 3))]}

    def literal(self):
        r = self.random
        quoted = repr(r.choice(["a", "b", "", " ", "role", "user", "type", "é", "\n", "e", "l", "it's", "tab\t", "x y"]))
        return r.choice([quoted, quoted, quoted, str(r.randint(0, 12)), "1.5", "0.1", "1e3", "true", "false", "none", "True", "None", "[]", "{}", "()"])

    def expression(self, depth=0):
        r = self.random
        if depth > 3 or r.random() < 0.25:
            return r.choice(self.NAMES) if r.random() < 0.65 else self.literal()
        e = lambda: self.expression(depth + 1)
        make = r.choice([
            lambda: f"{e()} + {e()}", lambda: f"{e()} ~ {e()}", lambda: f"({e()} - {e()})", lambda: f"{e()} * {r.randint(0, 3)}",
            lambda: f"{e()} // {r.randint(-3, 4)}", lambda: f"{e()} % {r.randint(-3, 4)}", lambda: f"{e()} / {r.randint(1, 4)}", lambda: f"-{e()}",
            lambda: f"{e()} {r.choice(['==', '!=', '<', '>', '<=', '>='])} {e()}", lambda: f"n {r.choice(['<', '<='])} {e()} < 7",
            lambda: f"{e()} {r.choice(['in', 'not in'])} {e()}", lambda: f"({e()} {r.choice(['and', 'or'])} {e()})", lambda: f"(not {e()})",
            lambda: f"({e()} if {e()} else {e()})", lambda: f"({e()} if {e()})", lambda: f"({e()})", lambda: f"[{e()}, {e()}]", lambda: f"({e()}, {e()})",
            lambda: "{" + f"'a': {e()}, 'b': {e()}" + "}", lambda: f"({e()})[{r.choice(['0', '-1', '1', 'n', repr('a'), repr('type'), repr('items')])}]",
            lambda: f"{r.choice(self.NAMES)}[{self.slice()}]", lambda: f"{r.choice(self.NAMES)}.{r.choice(['a', 'b', 'role', 'content', 'type', 'upper', 'items'])}",
            lambda: f"({e()}){self.filter(depth)}", lambda: f"{e()}{self.filter(depth)}", lambda: f"{e()}{self.filter(depth)}{self.filter(depth)}",
            lambda: f"({e()} is {self.test(depth)})", lambda: f"({e()} is not {self.test(depth)})", lambda: f"{r.choice('st')}{self.method(depth)}",
            lambda: f"d{r.choice(['.get(' + e() + ')', '.get(' + e() + ', ' + e() + ')', '.items() | list', '.keys() | list', '.values() | list'])}",
            lambda: f"range({r.randint(-2, 6)}, {r.randint(-2, 6)}, {r.choice([1, 2, -1])}) | list", lambda: "'a' 'b'", lambda: f"s.{r.choice(['strip', 'upper'])}()",
        ])
        return make()

    def slice(self):
        r = self.random
        part = lambda: r.choice(["", "", "0", "1", "-1", "n", "2", "-3"])
        return f"{part()}:{part()}" + (f":{r.choice(['', '1', '-1', '2', '-2'])}" if r.random() < 0.5 else "")

    def filter(self, depth):
        r = self.random
        e = lambda: self.expression(depth + 2)
        return " | " + r.choice([
            "trim", "trim('a ')", "length", "upper", "lower", "title", "capitalize", "string", "list", "first", "last", "reverse | list", "items | list", "abs",
            f"default({e()})", f"default({e()}, true)", f"d({e()})", "int", "int(7)", "float", "tojson", "tojson(indent=2)", "tojson(ensure_ascii=true)",
            "tojson(separators=(',', ':'))", "tojson(sort_keys=true)", f"join({e()})", "join", "join(', ', attribute='role')", f"replace({e()}, {e()})",
            "replace('a', 'bb', 1)", "replace('', '-')", "map('upper') | list", "map(attribute='role') | list", "map(attribute='a', default='z') | list", "map('length') | list",
            "select | list", "reject | list", "select('string') | list", "reject('none') | list", "selectattr('role', 'equalto', 'user') | list",
            "rejectattr('role', 'equalto', 'user') | list", "selectattr('content') | list", "select('in', l) | list", "indent", "indent(2, true)", "count",
        ])

    def test(self, depth):
        r = self.random
        e = lambda: self.expression(depth + 2)
        return r.choice(["defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "float", "boolean", "true", "false",
                         "callable", "odd", "even", "lower", "upper", f"eq({e()})", f"equalto({e()})", f"ne({e()})", f"in({e()})", f"gt({e()})", "divisibleby 3"])

    def method(self, depth):
        r = self.random
        e = lambda: self.expression(depth + 2)
        return r.choice([".strip()", ".lstrip()", ".rstrip()", f".strip({e()})", ".split()", f".split({e()})", ".split('a', 1)", ".split(none, 1)", ".split(' ')[-1]",
                         f".startswith({e()})", ".endswith(('e', 'd'))", ".upper()", ".lower()", ".title()", ".capitalize()", ".replace('a', 'b')", ".replace(' ', '', 1)",
                         ".find('e')", ".rfind('e')", ".count('l')", ".join(['a', 'b'])", ".splitlines()", ".splitlines(true)", ".removeprefix('h')", ".removesuffix('d')", ".isspace()"])

    def output(self):
        return f"{{{{{self.random.choice(['', '-', ' '])} {self.expression()} {self.random.choice(['', '-'])}}}}}"

    def tag(self, inner):
        r = self.random
        return f"{{%{r.choice(['', '', '-', '+'])} {inner} {r.choice(['', '', '-', '+'])}%}}"

    def statement(self, depth=0):
        r = self.random
        tag, body = self.tag, lambda: self.template(depth + 1)
        if depth > 2:
            return self.output()
        make = r.choice([
            self.output, self.output, self.output, lambda: tag(f"set {r.choice('xyz')} = {self.expression()}"),
            lambda: tag(f"set {r.choice('xyz')}" + r.choice(["", " | upper", " | trim | title"])) + body() + tag("endset"),
            lambda: tag("set ns = namespace(v=" + self.expression() + ")") + tag("for i in l") + tag("set ns.v = i") + tag("endfor") + "{{ ns.v }}",
            lambda: tag(f"if {self.expression()}") + body() + tag(f"elif {self.expression()}") + body() + tag("else") + body() + tag("endif"),
            lambda: tag(f"if {self.expression()}") + body() + tag("endif"),
            lambda: tag(f"for x in {self.expression()}") + body() + "{{ x }}" + self.loop() + tag("endfor"),
            lambda: tag(f"for x in l if {self.expression()}") + "{{ x }}" + self.loop() + tag("else") + body() + tag("endfor"),
            lambda: tag("for k, v in d.items()") + "{{ k }}={{ v }}" + self.loop() + tag("endfor"),
            lambda: tag("for x in m") + tag(f"if {self.expression()}") + tag(r.choice(["break", "continue"])) + tag("endif") + "{{ x.role }}" + self.loop() + tag("else") + "E" + tag("endfor"),
            lambda: tag("macro mac(a, b='q')") + body() + "{{ a }}{{ b }}" + tag("endmacro") + "{{ mac(" + r.choice(["s", "1, 2", "b=3", "a=n, b=l", ""]) + ") }}",
            lambda: "{#" + r.choice(["", "-"]) + " note " + r.choice(["", "-"]) + "#}", lambda: tag("raw") + " {{ x }} {% y %} " + tag("endraw"),
            lambda: tag("generation") + body() + tag("endgeneration"),
        ])
        return make()

    def loop(self):
        return self.random.choice(["", "", "{{ loop.index }}", "{{ loop.last }}", "{{ loop.first }}{{ loop.revindex }}", "{{ loop.length }}", "{{ loop.index0 }}",
                                   "{{ loop.previtem }}", "{{ loop.nextitem }}", "{{ loop.cycle('p', 'q') }}", "{% if not loop.last %}, {% endif %}"])

    def template(self, depth=0):
        r = self.random
        pieces = []
        for _ in range(r.randint(1, 3)):
            pieces.append(r.choice(["", "", " ", "\n", "text", "  \n", "\n  ", "a\n", "\t"]))
            pieces.append(self.statement(depth))
        pieces.append(r.choice(["", " ", "\n", "\n\n", "end"]))
        return "".join(pieces)
